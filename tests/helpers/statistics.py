from tests.helpers.chi_square import chi_square_pvalue  # noqa: F401 - the name that it had
