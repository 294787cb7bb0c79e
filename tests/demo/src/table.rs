//! Plain text for terminals: tables that fit a width, bars, numbers for people.

/// Rows under headings. Too wide for the terminal, a row becomes a block of `heading: cell` lines.
#[derive(Clone, Debug)]
pub(super) struct Table {
    headings: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

const GAP: &str = "  ";

impl Table {
    /// An empty table.
    pub fn new(headings: &[&'static str]) -> Self {
        Self { headings: headings.to_vec(), rows: Vec::new() }
    }

    /// Adds a row with a cell for each heading.
    pub fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.headings.len());
        self.rows.push(cells);
    }

    /// Characters that the widest line needs.
    pub fn width(&self) -> usize {
        let widths = self.widths();
        widths.iter().sum::<usize>() + GAP.len() * widths.len().saturating_sub(1)
    }

    fn widths(&self) -> Vec<usize> {
        (0..self.headings.len())
            .map(|column| {
                let cells = self.rows.iter().map(|row| row[column].chars().count());
                cells.chain([self.headings[column].chars().count()]).max().unwrap_or(0)
            })
            .collect()
    }

    /// The lines, each at most `width` characters.
    pub fn lines(&self, width: usize) -> Vec<String> {
        let widths = self.widths();
        if self.width() > width {
            return self.blocks(width);
        }
        let render = |cells: &mut dyn Iterator<Item = &str>| {
            let padded: Vec<String> =
                cells.zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
            padded.join(GAP).trim_end().to_owned()
        };
        let mut lines = vec![render(&mut self.headings.iter().copied())];
        for row in &self.rows {
            lines.push(render(&mut row.iter().map(String::as_str)));
        }
        lines
    }

    fn blocks(&self, width: usize) -> Vec<String> {
        let label = self.headings.iter().map(|h| h.chars().count()).max().unwrap_or(0);
        let mut lines = Vec::new();
        for row in &self.rows {
            if !lines.is_empty() {
                lines.push(String::new());
            }
            for (heading, cell) in self.headings.iter().zip(row) {
                lines.push(fit(&format!("{heading:<label$}  {cell}"), width));
            }
        }
        lines
    }
}

/// `text` cut to `width` characters.
pub(super) fn fit(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut cut: String = text.chars().take(width.saturating_sub(1)).collect();
    if width > 0 {
        cut.push('…');
    }
    cut
}

/// A bar of `width` cells, `part` of `whole` filled.
pub(super) fn bar(part: u64, whole: u64, width: usize) -> String {
    let cells = u128::try_from(width).unwrap_or(0) * 8;
    let eighths =
        if whole == 0 { 0 } else { (u128::from(part) * cells / u128::from(whole)).min(cells) };
    let eighths = usize::try_from(eighths).unwrap_or(0);
    let mut text = "█".repeat(eighths / 8);
    let parts = ['▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    if let Some(part) = (eighths % 8).checked_sub(1).and_then(|i| parts.get(i)) {
        text.push(*part);
    }
    let filled = text.chars().count();
    text + &"·".repeat(width.saturating_sub(filled))
}

/// `1234567` as `1,234,567`.
pub(super) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Microseconds as `0.85 ms`, `12.3 ms`.
pub(super) fn millis(us: u64) -> String {
    if us < 10_000 {
        format!("{}.{:02} ms", us / 1000, us % 1000 / 10)
    } else {
        format!("{}.{} ms", us / 1000, us % 1000 / 100)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new(&["TENANT", "GOT"]);
        table.row(vec!["chat".into(), "4 GiB on GPU 0".into()]);
        table.row(vec!["a-long-name".into(), "1".into()]);
        table
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let lines = table().lines(80);
        assert_eq!(lines[0], "TENANT       GOT");
        assert_eq!(lines[1], "chat         4 GiB on GPU 0");
        assert_eq!(lines[2], "a-long-name  1");
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        for width in [1, 5, 12, 20, 28, 80] {
            for line in table().lines(width) {
                assert!(line.chars().count() <= width, "{width}: {line:?}");
            }
        }
        assert_eq!(table().lines(20)[0], "TENANT  chat");
    }

    #[test]
    fn bars_are_always_as_wide_as_asked() {
        for (part, whole) in [(0, 0), (0, 8), (1, 100), (50, 100), (100, 100), (900, 100)] {
            assert_eq!(bar(part, whole, 10).chars().count(), 10, "{part} of {whole}");
        }
        assert_eq!(bar(50, 100, 4), "██··");
        assert_eq!(bar(100, 100, 3), "███");
    }

    #[test]
    fn numbers_read_well() {
        assert_eq!(count(0), "0");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(millis(850), "0.85 ms");
        assert_eq!(millis(12_345), "12.3 ms");
    }
}
