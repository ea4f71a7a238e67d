"""Tables of a results page, for the pictures that are drawn from them."""


def table(page: str, after: str) -> list[dict[str, str]]:
    """Rows of the first Markdown table after a text, each by column name.

    Args:
        page: A page of docs/results.
        after: Text that stands once before the table.
    """
    _, found, rest = page.partition(after)
    assert found, f"the page has no {after!r}"
    start = rest.index("\n|") + 1
    lines = rest[start:].split("\n\n")[0].splitlines()
    header, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(header, cells)) for cells in body]
