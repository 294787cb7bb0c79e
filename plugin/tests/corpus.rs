//! Replays what fuzzing kept, with this compiler: every input must be handled as `fuzz/src` says. An
//! empty or missing corpus is an error, so that it cannot get lost unnoticed.

#[path = "../../fuzz/src/lib.rs"]
mod readers;

use std::path::Path;

fn replay(target: &str) {
    let (_, check) = readers::TARGETS.iter().find(|(name, _)| *name == target).unwrap();
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let mut inputs = 0;
    for entry in std::fs::read_dir(&corpus).unwrap_or_else(|e| panic!("{}: {e}", corpus.display()))
    {
        let path = entry.unwrap().path();
        let input = std::fs::read(&path).unwrap();
        // The test's output names the input that failed.
        println!("{}", path.display());
        check(&input);
        inputs += 1;
    }
    assert!(inputs > 0, "{} is empty", corpus.display());
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
