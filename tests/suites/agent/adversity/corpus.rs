//! Replays what fuzzing kept, with this compiler: every input must be handled as `fuzz/src` says. An
//! empty or missing corpus is an error, so that it cannot get lost unnoticed.

#[path = "../../../../fuzz/src/lib.rs"]
#[allow(unused, reason = "what only tests of the release build read")]
mod readers;

use tessera_harness::{corpus, workspace};

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

fn replay(target: &str) {
    let (_, check) = readers::TARGETS.iter().find(|(name, _)| *name == target).unwrap();
    let mut replayed = 0;
    for (path, input) in corpus::inputs(target) {
        // The test's output names the input that failed.
        println!("{path}");
        check(&input);
        replayed += 1;
    }
    assert!(replayed > 0, "the corpus of {target} is empty");
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
