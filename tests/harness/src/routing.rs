//! Asking a driver for every function in every way, with `tests/programs/routing.c`, and comparing
//! what comes back with and without the shim.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;

use tessera_cuda::coverage::{base_name, inert, unhooked};
use tessera_cuda::hooks::HOOKS;

use crate::{Output, Preloaded, compile_c};

/// Every version from which cudaTypedefs.h (12.9 to 13.5) knows some function, and versions between
/// and beyond.
const VERSIONS: &[u32] = &[
    1000, 2000, 2010, 2020, 2030, 3000, 3010, 3020, 4000, 4010, 5000, 5050, 6000, 6050, 7000, 7050,
    8000, 9000, 9020, 10000, 10010, 10020, 11000, 11010, 11020, 11030, 11040, 11050, 11060, 11070,
    11080, 12000, 12010, 12020, 12030, 12040, 12050, 12060, 12080, 12090, 13000, 13010, 13050,
    99000,
];

/// All names that could be asked for: of functions, of their variants, of nothing.
fn names() -> BTreeSet<String> {
    let bases = HOOKS.iter().map(|hook| base_name(hook.export));
    let bases = bases.chain(unhooked()).chain(inert());
    let mut names: BTreeSet<String> = bases.map(str::to_owned).collect();
    names.extend(HOOKS.iter().map(|hook| hook.export.to_owned()));
    let unknown = ["cuBogus", "cuMemAlloc_v9", "cudaMalloc", "curl_easy_init", "malloc"];
    names.extend(unknown.map(str::to_owned));
    names
}

/// What a driver answered to every question.
#[derive(Debug)]
pub struct Answers {
    /// All that the program said.
    pub output: Output,
}

impl Answers {
    /// Asks the driver in `library_path`, bare.
    pub fn bare(library_path: &Path) -> Self {
        Self::of(Preloaded::bare(compile_c("routing")).env("LD_LIBRARY_PATH", library_path))
    }

    /// Asks the driver in `library_path` through the shim.
    pub fn through_shim(library_path: &Path) -> Self {
        Self::of(Preloaded::new(compile_c("routing")).env("LD_LIBRARY_PATH", library_path))
    }

    /// Asks in `program`'s environment; `program` must be `routing`.
    pub fn of(program: Preloaded) -> Self {
        let mut running = program.args(VERSIONS.iter().map(u32::to_string)).spawn();
        let mut stdin = running.take_stdin().expect("piped");
        let asking = std::thread::spawn(move || {
            for name in names() {
                // It ends early only if the program died, which its status tells.
                let _ = writeln!(stdin, "{name}");
            }
        });
        let output = running.wait();
        asking.join().expect("it only writes");
        assert!(output.success(), "{}", output.stderr);
        Self { output }
    }

    /// Question (with the result and status that came back) → where the pointer leads.
    pub fn by_question(&self) -> BTreeMap<&str, &str> {
        self.output.stdout.lines().filter_map(|line| line.split_once(" -> ")).collect()
    }

    /// Checks `shim` against these bare answers: a hooked export became its hook, everything else,
    /// results and statuses included, is as it was. Returns the hooked exports that were reached.
    pub fn check_routing(&self, shim: &Self) -> BTreeSet<&str> {
        let (bare, shim) = (self.by_question(), shim.by_question());
        let changed = bare.keys().filter(|question| !shim.contains_key(*question));
        let mut wrong: Vec<String> =
            changed.map(|question| format!("{question}: result or status changed")).collect();
        let mut reached = BTreeSet::new();
        for (question, answer) in &shim {
            let Some(own) = bare.get(question) else { continue };
            let hooked = own
                .strip_prefix("libcuda.so.1 ")
                .filter(|symbol| HOOKS.iter().any(|hook| hook.export == *symbol));
            let expected =
                hooked.map_or((*own).to_owned(), |symbol| format!("libtessera.so {symbol}"));
            reached.extend(hooked);
            if *answer != expected {
                wrong.push(format!("{question}: {answer}, expected {expected}"));
            }
        }
        let shown: Vec<_> = wrong.iter().take(20).collect();
        assert!(wrong.is_empty(), "{} of {} answers differ: {shown:#?}", wrong.len(), shim.len());
        assert!(bare.len() > 100_000, "only {} questions were asked", bare.len());
        reached
    }
}
