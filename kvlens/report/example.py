"""The prompt and text that ``kvlens report`` takes when none is given: the help page of a function that does not exist.

No training text holds it, so whatever the model knows about it comes from the prompt. The text repeats the invented names in
places that only a reader of the prompt can foresee.
"""

EXAMPLE_PROMPT = """\
frobnicate(widget, colour='purple', depth=7)

Frobnicate a widget and return it.

Parameters
----------
widget : Widget
    The widget to frobnicate.
colour : str, optional
    The colour of the frobnicated widget. The default is 'purple'.
depth : int, optional
    How deep the widget is frobnicated. The default is 7.

Returns
-------
Widget
    The frobnicated widget.

"""

EXAMPLE_TEXT = """\
Examples
--------
>>> widget = Widget()
>>> frobnicate(widget, colour='purple', depth=7)
The widget is"""
