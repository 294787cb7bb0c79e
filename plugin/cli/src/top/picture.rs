//! Styled lines, cut to an area.

use crossterm::style::{ContentStyle, StyledContent};
use tessera_api::print::{columns, head};
use tessera_model::printable;

/// A text in one style.
pub(super) type Span = StyledContent<String>;

/// A text in this style, printable.
pub(super) fn span(text: &str, style: ContentStyle) -> Span {
    style.apply(printable::line(text).into_owned())
}

/// A text without any style.
pub(super) fn raw(text: &str) -> Span {
    span(text, ContentStyle::new())
}

/// An area, filled from above.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Picture {
    width: usize,
    height: usize,
    lines: Vec<Vec<Span>>,
}

impl Picture {
    /// An empty one of `width` columns and `height` lines.
    pub fn new(width: u16, height: u16) -> Self {
        Picture { width: width.into(), height: height.into(), lines: Vec::new() }
    }

    /// Columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Lines that are left.
    pub fn left(&self) -> usize {
        self.height - self.lines.len()
    }

    /// Adds a line, as far as there is room.
    pub fn line(&mut self, spans: impl IntoIterator<Item = Span>) {
        if self.left() == 0 {
            return;
        }
        let mut left = self.width;
        let cut = spans.into_iter().map_while(|span| {
            let text = head(span.content(), left);
            left -= columns(text);
            (!text.is_empty()).then(|| span.style().apply(text.to_owned()))
        });
        self.lines.push(cut.collect());
    }

    /// Whether both have the same size.
    pub fn is_as_large_as(&self, other: &Picture) -> bool {
        (self.width, self.height) == (other.width, other.height)
    }

    /// Goes on where just `left` lines are left.
    pub fn skip_to(&mut self, left: usize) {
        let at = self.height.saturating_sub(left).max(self.lines.len());
        self.lines.resize_with(at, Vec::new);
    }

    /// What is to be printed, from above; lines below are empty.
    pub fn lines(&self) -> &[Vec<Span>] {
        &self.lines
    }

    /// The text of each line, without the spaces at its end.
    pub fn text(&self) -> impl Iterator<Item = String> + '_ {
        self.lines.iter().map(|line| {
            let text: String = line.iter().map(|span| span.content().as_str()).collect();
            text.trim_end().to_owned()
        })
    }
}
