//! Text tables: columns as wide as their widest cell, numbers right-aligned.

/// Formats `rows` under `head`. The first `left` columns are text and are left-aligned.
pub(crate) fn lay_out(head: &[&str], left: usize, rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain(head.get(column).map(|cell| cell.chars().count())).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |cells: &[String]| {
        let cell = |(column, (cell, width)): (usize, (&String, &usize))| {
            if column < left { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        };
        let cells: Vec<String> = cells.iter().zip(&widths).enumerate().map(cell).collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    let head: Vec<String> = head.iter().map(|&cell| cell.to_owned()).collect();
    let rule: Vec<String> = widths.iter().map(|width| "─".repeat(*width)).collect();
    [line(&head), line(&rule)].into_iter().chain(rows.iter().map(|row| line(row))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_goes_to_the_left_and_numbers_to_the_right() {
        let rows = [vec!["one".to_owned(), "1.25".to_owned()], vec!["twelve".to_owned(), "12.00".to_owned()]];
        let expected = "what    seconds\n──────  ───────\none        1.25\ntwelve    12.00\n";
        assert_eq!(lay_out(&["what", "seconds"], 1, &rows), expected);
    }
}
