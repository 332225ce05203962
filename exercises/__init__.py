"""Exercises: notebooks to work in, made from solutions/ by a command, and the checks that judge the answers.

The worked answers are in solutions/.
"""
