//! Columns of text as wide as their widest cell.

/// A line per row. Numbers, by their column, end where the column ends; `gap` is between columns.
pub fn aligned<const N: usize>(rows: &[[String; N]], gap: &str, is_number: impl Fn(usize) -> bool) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |row: &[String; N]| {
        let cells: Vec<String> = (0..N)
            .map(|column| match (&row[column], widths[column]) {
                (cell, width) if is_number(column) => format!("{cell:>width$}"),
                (cell, width) => format!("{cell:<width$}"),
            })
            .collect();
        cells.join(gap).trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}
