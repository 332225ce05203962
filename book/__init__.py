"""The course as a site: `make site` turns notebooks, README, glossary and docstrings into static pages.

    pages      notebooks and Markdown -> what Sphinx reads          reference  docstrings -> the pages of functions
    sliders    pictures for sliders that move without Python        maths      formulas -> MathML
    conf.py    Sphinx's settings                                    __main__   all of it, in one command

Nothing here is imported by the course. It reads files, and of the course's own code it runs only what draws the
sliders' pictures, so that neither torch nor a GPU is needed. What may not enter: solutions.
"""
