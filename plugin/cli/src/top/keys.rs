//! What keys do. Pure.

use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::model::{Model, Sort};

/// Keys and what they do, for the help.
pub(super) const HELP: &[(&str, &str)] = &[
    ("m", "sort by memory"),
    ("c", "sort by share of GPU time used in 10 s"),
    ("w", "sort by time waited"),
    ("r", "sort by refusals"),
    ("n", "sort by name"),
    ("R", "reverse (or the same key again)"),
    ("/", "show only what contains a text; Esc: all"),
    ("space, p", "pause"),
    ("j k, arrows, PgUp PgDn", "scroll"),
    ("?, h", "this help"),
    ("q, Ctrl-C", "quit"),
];

/// A page of rows, for scrolling; what a small terminal has.
const PAGE: usize = 10;

impl Model {
    /// Takes a key.
    pub fn press(&mut self, key: KeyEvent) {
        if key.kind == KeyEventKind::Release {
            return;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            self.quit |= matches!(key.code, KeyCode::Char('c' | 'd'));
            return;
        }
        if self.editing {
            return self.edit(key.code);
        }
        let help = std::mem::take(&mut self.help);
        match key.code {
            KeyCode::Char('q') => self.quit = true,
            KeyCode::Char('m') => self.sort_by(Sort::Memory),
            KeyCode::Char('c') => self.sort_by(Sort::Share),
            KeyCode::Char('w') => self.sort_by(Sort::Waiting),
            KeyCode::Char('r') => self.sort_by(Sort::Refusals),
            KeyCode::Char('n') => self.sort_by(Sort::Name),
            KeyCode::Char('R') => self.reverse = !self.reverse,
            KeyCode::Char('/') => self.editing = true,
            KeyCode::Char(' ' | 'p') => self.paused = !self.paused,
            KeyCode::Char('?' | 'h') => self.help = !help,
            KeyCode::Esc if !help => self.filter.clear(),
            KeyCode::Char('j') | KeyCode::Down => self.scroll += 1,
            KeyCode::Char('k') | KeyCode::Up => self.scroll = self.scroll.saturating_sub(1),
            KeyCode::PageDown => self.scroll += PAGE,
            KeyCode::PageUp => self.scroll = self.scroll.saturating_sub(PAGE),
            KeyCode::Home => self.scroll = 0,
            _ => {}
        }
        self.scroll = self.scroll.min(self.shown().len().saturating_sub(1));
    }

    fn sort_by(&mut self, sort: Sort) {
        self.reverse = self.sort == sort && !self.reverse;
        self.sort = sort;
        self.scroll = 0;
    }

    fn edit(&mut self, key: KeyCode) {
        match key {
            KeyCode::Enter => self.editing = false,
            KeyCode::Esc => {
                self.editing = false;
                self.filter.clear();
            }
            KeyCode::Backspace if self.filter.pop().is_none() => self.editing = false,
            KeyCode::Char(c) if self.filter.chars().count() < 64 => self.filter.push(c),
            _ => {}
        }
        self.scroll = 0;
    }
}
