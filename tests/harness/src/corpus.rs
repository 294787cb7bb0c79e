//! What fuzzing kept, in `fuzz/corpus`.

use crate::workspace;

/// What is kept for this target, each with its file and line.
///
/// # Panics
/// The corpus is not there: it must not get lost unnoticed.
pub fn inputs(target: &str) -> impl Iterator<Item = (String, Vec<u8>)> {
    let file = format!("fuzz/corpus/{target}.txt");
    let path = workspace().join(&file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let named = move |(at, line): (usize, String)| {
        (!line.starts_with('#'))
            .then(|| (format!("fuzz/corpus/{target}.txt:{}", at + 1), unescaped(&line)))
    };
    let named: Vec<_> = lines.into_iter().enumerate().filter_map(named).collect();
    named.into_iter()
}

/// The bytes of a line, which is in the escapes of a byte string; `fuzz/corpus.py` writes it.
fn unescaped(line: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = line.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'\\' {
            bytes.push(byte);
            continue;
        }
        bytes.push(match rest.next() {
            Some(b'n') => b'\n',
            Some(b'r') => b'\r',
            Some(b't') => b'\t',
            Some(b'\\') => b'\\',
            Some(b'x') => {
                let digits: String = rest.by_ref().take(2).map(char::from).collect();
                u8::from_str_radix(&digits, 16).unwrap_or_else(|_| panic!("\\x{digits} in {line}"))
            }
            other => panic!("an escape {other:?} in {line}"),
        });
    }
    bytes
}
