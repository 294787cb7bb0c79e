//! A script: a command a line.

use std::path::Path;

use super::command::{self, Command};
use super::words::words;

/// A line of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// `file:line`.
    pub place: String,
    /// As it is written.
    pub text: String,
    /// What it asks for.
    pub command: Command,
    /// It began with `!`: it must fail.
    pub must_fail: bool,
}

/// Reads a script; all its errors at once where a line is no command. `-` is standard input.
///
/// # Errors
/// What is wrong, or why the file cannot be read.
pub fn read(file: &Path) -> Result<Vec<Line>, String> {
    let text = match file.to_str() {
        Some("-") => std::io::read_to_string(std::io::stdin()),
        _ => std::fs::read_to_string(file),
    };
    let text =
        text.map_err(|error| format!("cannot read the script {}: {error}", file.display()))?;
    parse(&file.display().to_string(), &text)
}

fn parse(file: &str, text: &str) -> Result<Vec<Line>, String> {
    let mut lines = Vec::new();
    let mut wrong = Vec::new();
    for (number, text) in text.lines().enumerate() {
        let place = format!("{file}:{}", number + 1);
        let text = text.trim();
        let (must_fail, bare) = match text.strip_prefix('!') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let words = match words(bare) {
            Ok(words) if words.is_empty() => continue,
            Ok(words) => words,
            Err(error) => {
                wrong.push(format!("{place}: {error}"));
                continue;
            }
        };
        match command::parse(&words) {
            Ok(command) => {
                lines.push(Line { place, text: text.to_owned(), command, must_fail });
            }
            Err((error, _)) => {
                wrong.push(format!("{place}: {}", error.lines().next().unwrap_or_default()));
            }
        }
    }
    if wrong.is_empty() { Ok(lines) } else { Err(wrong.join("\n")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_commands_and_comments_are_not() {
        let lines = parse("s", "# a comment\n\nrun a --load idle\n! run b --gpu 9 # too many\n");
        let lines = lines.unwrap();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[1].place, "s:4");
        assert!(lines[1].must_fail && !lines[0].must_fail);
    }

    #[test]
    fn all_that_is_wrong_is_said_with_its_line() {
        let wrong = parse("s", "run A\nrun b\nrun 'c\nxid 0\n").unwrap_err();
        let places: Vec<&str> =
            wrong.lines().map(|line| line.split(": ").next().unwrap()).collect();
        assert_eq!(places, ["s:1", "s:3", "s:4"], "{wrong}");
    }
}
