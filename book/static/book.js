// What a page does beyond showing itself: words of the glossary explained in place, sliders, boxes that scroll by key.
"use strict";

// A word of the glossary: its entry stands in the link's title, and without this script the browser shows that.
let shown = null;
function hide() {
  if (shown) shown.remove();
  shown = null;
}
document.querySelectorAll("a.term[title]").forEach((link, number) => {
  const text = link.title;
  link.removeAttribute("title");
  const show = () => {
    hide();
    shown = document.createElement("div");
    shown.className = "hover";
    shown.role = "tooltip";
    shown.id = `term-${number}`;
    shown.textContent = text;
    link.setAttribute("aria-describedby", shown.id);
    document.body.append(shown);
    const at = link.getBoundingClientRect(), box = shown.getBoundingClientRect();
    const width = document.documentElement.clientWidth;
    const above = at.bottom + box.height + 8 > window.innerHeight && at.top > box.height + 8;
    shown.style.left = `${Math.max(8, Math.min(at.left, width - box.width - 8)) + window.scrollX}px`;
    shown.style.top = `${(above ? at.top - box.height - 6 : at.bottom + 6) + window.scrollY}px`;
  };
  link.addEventListener("mouseenter", show);
  link.addEventListener("focus", show);
  link.addEventListener("mouseleave", hide);
  link.addEventListener("blur", hide);
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });

// A slider: each setting has its picture, named by the places of its controls.
document.querySelectorAll(".slider").forEach((slider) => {
  const inputs = [...slider.querySelectorAll("input, select")], picture = slider.querySelector("img");
  slider.querySelector(".controls").hidden = false;
  slider.querySelector(".still").remove();
  const move = () => {
    for (const input of inputs) {
      if (!input.dataset.texts) continue;
      const text = JSON.parse(input.dataset.texts)[input.value];
      input.setAttribute("aria-valuetext", text);
      input.nextElementSibling.textContent = text;
    }
    picture.src = `${slider.dataset.pictures}${inputs.map((input) => input.value).join("-")}.png`;
  };
  inputs.forEach((input) => input.addEventListener("input", move));
});

// What scrolls sideways can be reached by the keyboard.
function reachable() {
  document.querySelectorAll(".formula, .doc pre, div.highlight pre, .pst-scrollable-table-container").forEach((box) => {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else if (box.tabIndex === 0) box.removeAttribute("tabindex");
  });
}
window.addEventListener("load", reachable);
window.addEventListener("resize", reachable);
document.addEventListener("toggle", reachable, true);
document.fonts.ready.then(reachable);
