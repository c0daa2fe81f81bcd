//! Columns of text as wide as their widest cell.

/// A line per row; all rows have as many cells as the first. Numbers, by their column, end where the column ends; `gap` is
/// between columns.
pub fn aligned<R: AsRef<[String]>>(rows: &[R], gap: &str, is_number: impl Fn(usize) -> bool) -> String {
    let columns = rows.first().map_or(0, |row| row.as_ref().len());
    let width = |column: usize| rows.iter().map(|row| row.as_ref()[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &R| {
        let cells: Vec<String> = (0..columns)
            .map(|column| match (&row.as_ref()[column], widths[column]) {
                (cell, width) if is_number(column) => format!("{cell:>width$}"),
                (cell, width) => format!("{cell:<width$}"),
            })
            .collect();
        cells.join(gap).trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}
