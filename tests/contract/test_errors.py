"""The error tree drawn in the module's docstring is the tree that exists."""

from collage_monitor import errors


def test_the_drawn_tree_is_the_real_one():
    drawn = [line.replace("│", " ") for line in (errors.__doc__ or "").splitlines()[2:] if line.strip()]
    ancestors: list[str] = []
    for line in drawn:
        name = line.lstrip(" ├└─").split()[0]
        depth = (len(line) - len(line.lstrip(" ├└─"))) // 4
        ancestors[depth:] = [name]
        found = getattr(errors, name)
        assert found.__base__.__name__ == (ancestors[depth - 1] if depth else "Exception") or depth
        if depth:
            assert issubclass(found, getattr(errors, ancestors[depth - 1]))
    names = {line.lstrip(" ├└─").split()[0] for line in drawn}
    assert names == set(errors.__all__)
