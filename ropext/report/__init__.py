"""Reports of a measurement: a table for the terminal, a JSON document, and one page with plots.

Nothing here measures. Losses in nats per token, lengths and positions in tokens.
"""

from ropext.report.files import to_json, write_report
from ropext.report.terminal import table

__all__ = ["table", "to_json", "write_report"]
