"""Who runs next: blocks start, threads run until they wait, and all of them end.

scheduler      a part of the grid, block by block of code          words          messages, and what they name
threads        special registers, lanes together                   declarations   the variable that nothing set
divergence     do threads come to barriers together?               printf         device printf
waiting        who waits for whom, when nobody can run
"""
