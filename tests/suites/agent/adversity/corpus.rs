//! Replays what fuzzing kept, with this compiler: every input must be handled as `fuzz/src` says. An
//! empty or missing corpus is an error, so that it cannot get lost unnoticed.

#[path = "../../../../fuzz/src/lib.rs"]
mod readers;

use tessera_harness::artefacts;
use tessera_harness::plugin::{GPU, Simulated, bounded};
use tessera_harness::workspace;
use tessera_store::{Ledger, Opened};

/// What is kept for this target, each with its file and line.
fn inputs(target: &str) -> impl Iterator<Item = (String, Vec<u8>)> {
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

/// The crate is compiled by no other check, and this suite has more crates than it.
#[test]
fn the_fuzz_crate_depends_on_all_that_its_source_uses() {
    let dir = workspace().join("fuzz");
    let manifest = std::fs::read_to_string(dir.join("Cargo.toml")).unwrap();
    for part in ["src", "targets"] {
        for file in std::fs::read_dir(dir.join(part)).unwrap() {
            let path = file.unwrap().path();
            let source = std::fs::read_to_string(&path).unwrap();
            let words = source.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
            for used in words.filter(|word| word.starts_with("tessera_") && *word != "tessera_fuzz")
            {
                let dependency = format!("\n{} = ", used.replace('_', "-"));
                assert!(manifest.contains(&dependency), "{}: {used}", path.display());
            }
        }
    }
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

fn replay(target: &str) {
    let (_, check) = readers::TARGETS.iter().find(|(name, _)| *name == target).unwrap();
    let mut replayed = 0;
    for (path, input) in inputs(target) {
        // The test's output names the input that failed.
        println!("{path}");
        check(&input);
        replayed += 1;
    }
    assert!(replayed > 0, "the corpus of {target} is empty");
}

/// Whether redb panics when it reads this file.
fn panics(file: &[u8]) -> bool {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    std::fs::write(&path, file).unwrap();
    let (_, opened) = Ledger::open(&path, false).unwrap();
    matches!(opened, Opened::Rebuilt { reason, .. } if reason.contains("its reader panicked"))
}

/// The plugin as it is shipped: another profile could abort where this test's own unwinds. Which damage redb
/// panics on depends on the profile, too.
#[tokio::test]
async fn the_built_plugin_starts_on_ledgers_whose_reader_panics() {
    let mut node = Simulated::new("replicas = 4").await;
    node.program = artefacts().tessera();
    let ledger = node.dir.path().join("ledger.redb");
    let mut panicked = 0;
    for (input, damage) in inputs("ledger") {
        let file = readers::damaged_ledger(&damage);
        if !panics(&file) {
            continue;
        }
        std::fs::write(&ledger, &file).unwrap();
        node.serve().await;
        bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
        let warning = node.json()["warnings"].to_string();
        assert!(warning.contains("the ledger was unreadable"), "{input}: {warning}");
        panicked += u32::from(warning.contains("its reader panicked"));
        assert_eq!(node.terminate().await, Some(0));
    }
    assert!(panicked > 0, "redb panics on none of the corpus");
}

macro_rules! replays {
    ($($target:ident)*) => {
        $(#[test]
        fn $target() {
            replay(stringify!($target));
        })*

        #[test]
        fn every_target_is_replayed() {
            let names: Vec<_> = readers::TARGETS.iter().map(|(name, _)| *name).collect();
            assert_eq!(names, [$(stringify!($target)),*]);
        }
    };
}

replays! { usage_page usage_file quota_page session http2 config ledger }
