"""A checkpoint's weights, mapped into memory and read one tensor at a time.

safetensors files map: a tensor costs memory only once it is read. What a folder lacks, or holds in another shape, is
said before anything large has been read.
"""

import contextlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from models import mamba2_names
from models.mamba2_config import Config as Mamba2Config
from models.reading import BadModel, read_json

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def layer_shapes(config):
    """{name in a layer: shape} of the tensors of one layer, as Hugging Face names them."""
    c, attention, ffn = config, "self_attn.", "mlp."
    shapes = {
        "input_layernorm.weight": (c.hidden,),
        attention + "q_proj.weight": (c.q_rows, c.hidden),
        attention + "k_proj.weight": (c.kv_rows, c.hidden),
        attention + "v_proj.weight": (c.kv_rows, c.hidden),
        attention + "o_proj.weight": (c.hidden, c.q_rows),
        "post_attention_layernorm.weight": (c.hidden,),
        ffn + "gate_proj.weight": (c.ffn, c.hidden),
        ffn + "up_proj.weight": (c.ffn, c.hidden),
        ffn + "down_proj.weight": (c.hidden, c.ffn),
    }
    if c.biases:
        shapes |= {attention + "q_proj.bias": (c.q_rows,)}
        shapes |= {attention + f"{name}_proj.bias": (c.kv_rows,) for name in "kv"}
    if c.head_norms:
        shapes |= {attention + f"{name}_norm.weight": (c.head_dim,) for name in "qk"}
    return shapes


def all_shapes(config):
    """{name: shape} of every tensor of a checkpoint."""
    if isinstance(config, Mamba2Config):
        return mamba2_names.all_shapes(config)
    shapes = {"model.embed_tokens.weight": (config.vocab, config.hidden)}
    for index in range(config.n_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer_shapes(config).items()}
    shapes["model.norm.weight"] = (config.hidden,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab, config.hidden)
    return shapes


class Checkpoint:
    """The tensors of a folder by name. A context manager; `close` ends it.

    Opening looks at every file's header: BadModel for a file that is missing or cut short, a tensor that is missing,
    has another shape than the config says, or a dtype that is not bf16, fp16 or fp32.
    """

    def __init__(self, folder, config):
        self.folder, self.config = Path(folder), config
        self._open = contextlib.ExitStack()
        try:
            self._files = {path: self._file(path) for path in self._paths()}
            self._path_of = {name: path for path, file in self._files.items() for name in file.keys()}  # noqa: SIM118
            self._where = {name: self._files[path] for name, path in self._path_of.items()}
            self._headers = {}
            if isinstance(config, Mamba2Config):
                mamba2_names.expect_layers(self.folder, config, self._where)
            self.dtypes = {self._look(name, shape) for name, shape in all_shapes(config).items()}
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._open.close()

    def __getitem__(self, name):
        """One tensor, on the CPU, as it is stored: its memory is the file's, until it is written elsewhere."""
        return self._where[name].get_tensor(name)

    def place(self, name):
        """Where a tensor's bytes lie: (path of the file, the first byte, how many)."""
        path = self._path_of[name]
        if path not in self._headers:
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                self._headers[path] = 8 + size, json.loads(file.read(size))
        data, header = self._headers[path]
        begin, end = header[name]["data_offsets"]
        return path, data + begin, end - begin

    def shape(self, name):
        """A tensor's shape, from its file's header."""
        return tuple(self._where[name].get_slice(name).get_shape())

    @property
    def bytes(self):
        """Bytes of all tensors that the model needs."""
        total = 0
        for name, shape in all_shapes(self.config).items():
            size = DTYPES[self._where[name].get_slice(name).get_dtype()].itemsize
            total += size * int(torch.Size(shape).numel())
        return total

    def _paths(self):
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            names = sorted(set(read_json(index).get("weight_map", {}).values()))
            if not names:
                raise BadModel(f"{index}: weight_map must name files, got none")
            missing = [name for name in names if not (self.folder / name).is_file()]
            if missing:
                have = f"{len(names) - len(missing)} of its {len(names)} files"
                raise BadModel(f"{index}: names {missing[0]}, which is not in the folder (it has {have})")
            return [self.folder / name for name in names]
        one = self.folder / "model.safetensors"
        paths = [one] if one.is_file() else sorted(self.folder.glob("*.safetensors"))
        if not paths:
            others = [p.name for p in self.folder.glob("*.bin")] or [p.name for p in self.folder.glob("*.gguf")]
            found = f", found {others[0]}" if others else ", found none"
            if "pytorch_model.bin" in others:
                found += "; python -m models.to_safetensors FOLDER makes one of it"
            raise BadModel(f"{self.folder}: expected weights in model.safetensors or in several *.safetensors{found}")
        return paths

    def _file(self, path):
        try:
            return self._open.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise BadModel(f"{path}: is not a whole safetensors file: {error}") from None

    def _look(self, name, shape):
        if name not in self._where:
            raise BadModel(f"{self.folder}: expected a tensor {name} of shape {shape}, found none in its files")
        found = self._where[name].get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise BadModel(f"{self.folder}: {name} must have shape {shape}, got {tuple(found.get_shape())}")
        if found.get_dtype() not in DTYPES:
            raise BadModel(f"{self.folder}: {name} must be of {', '.join(DTYPES)}, got {found.get_dtype()}")
        return DTYPES[found.get_dtype()]


def expect_finite(name, tensor):
    """Raise BadModel if a tensor holds NaN or infinity: the sum is such a number then, and nothing is copied."""
    if not torch.isfinite(tensor.sum(dtype=torch.float32)) and not torch.isfinite(tensor).all():
        where = tuple(int(i) for i in (~torch.isfinite(tensor)).nonzero()[0])
        raise BadModel(f"{name}: weights must be finite, got {tensor[where].item()} at {where}")
