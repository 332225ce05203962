"""The style of all pictures: colours that a colour-blind reader can tell apart, and a white figure."""

# Okabe and Ito's palette, darkest first for lines and bars.
BLUE, ORANGE, GREEN, RED, SKY, PURPLE, BLACK = "#0072B2 #E69F00 #009E73 #D55E00 #56B4E9 #CC79A7 #222222".split()
COLOURS = [BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK]


def figure(width=8, height=4, columns=1, rows=1):
    """A figure and its axes in the course's style. White behind, so that it reads on a dark page too."""
    import matplotlib.pyplot as plt

    style = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 11, "axes.titlesize": 12}
    with plt.rc_context(style):
        picture, axes = plt.subplots(rows, columns, figsize=(width, height), dpi=100, layout="constrained")
    picture.set_facecolor("white")
    return picture, axes


def rectangle(x, y, width, height, colour, edge=0.8):
    """A rectangle with a grey edge, to be added to an axis."""
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=colour, edgecolor="#999999", linewidth=edge)


def finish(picture):
    """Close the figure for pyplot and return it: a notebook shows a returned figure once, and never twice."""
    import matplotlib.pyplot as plt

    plt.close(picture)
    return picture
