//! The kernel refuses the shim memory for its tables: whatever it could not note, nobody has.

use std::fmt::Display;
use std::path::PathBuf;
use tessera_harness::alone;

use tessera_harness::{
    CProgram, Conversation, MIB, Pages, Preloaded, SimGpu, artefacts, compile_c,
};

const OUT_OF_MEMORY: i64 = 2;
/// A context of the simulated driver.
const CONTEXT: u64 = 64 * MIB;

/// `program` with the shim and `starve` preloaded, which `how` tells what to do.
fn starved(
    program: &str,
    sim: &SimGpu,
    pages: &Pages,
    how: &[(&str, impl Display)],
) -> Conversation {
    let starve: PathBuf = CProgram::new("starve").shared().build();
    let preload = format!("{}:{}", artefacts().shim().display(), starve.display());
    let program = Preloaded::new(compile_c(program)).sim(sim).pages(pages);
    let program = program.env("LD_PRELOAD", preload);
    Conversation::start(how.iter().fold(program, |p, (name, value)| p.env(name, value.to_string())))
}

/// Commands, in which `$N` is the first value that command N answered, if it answered one.
const SCRIPTS: &[(&str, &[&str])] = &[
    (
        "calls",
        &[
            "init 0",
            "retain 0",
            "alloc 8388608",
            "managed 8388608",
            "pitch 4096 1024 4",
            "async 8388608",
            "ctx 0",
            "alloc 8388608",
            "destroy $6",
            "current $1",
            "alloc 8388608",
            "free $2",
            "alloc 4194304",
            "info",
        ],
    ),
    (
        "vmm",
        &[
            "init",
            "retain 0",
            "array 1024 1024 32 1",
            "create 0 8388608",
            "reserve 8388608",
            "map $4 8388608 $3",
            "release $3",
            "unmap $4 8388608",
            "alloc 8388608",
            "getipc $8",
            "free $8",
            "mipmap 1024 1024 0 32 1 0 3",
            "unarray $2",
            "create 0 8388608",
            "multicast 1 8388608",
            "member $14 0",
            "bind $14 0 $13 8388608",
            "release $13",
            "info",
        ],
    ),
    (
        "graph_memory",
        &[
            "init",
            "retain 0",
            "graph 41943040 1",
            "launch $2 0",
            "sync",
            "nested 41943040",
            "launch $5 0",
            "sync",
            "uploaded 41943040",
            "launch $8 0",
            "sync",
            "capture 41943040",
            "launch $11 0",
            "sync",
            "destroy $2",
            "info",
        ],
    ),
    (
        "pools",
        &[
            "init",
            "retain 0",
            "default 0",
            "async 8388608 8",
            "create 1 1 0",
            "from $4 8388608 8",
            "free_async $3 8",
            "sync",
            "destroy $4",
            "async 8388608 3",
            "info",
        ],
    ),
];

/// Runs a script; how many commands were refused for want of memory.
fn play(script: &(&str, &[&str]), how: &[(&str, u64)]) -> usize {
    let (program, commands) = script;
    let sim = SimGpu::start_default();
    let pages = Pages::with_overhead(&[(sim.uuid(0), 2048 * MIB)], CONTEXT);
    let mut witness = Conversation::start(Preloaded::bare(compile_c("calls")).sim(&sim));
    witness.must("init");
    witness.must("retain 0");
    let before = witness.must("info");
    let mut tenant = starved(program, &sim, &pages, how);
    let (mut values, mut refused) = (Vec::new(), 0);
    for command in *commands {
        let mut line = (*command).to_owned();
        for (at, value) in values.iter().enumerate().rev() {
            line = line.replace(&format!("${at}"), &format!("{value}"));
        }
        let reply = tenant.ask(&line);
        refused += usize::from(reply.result == OUT_OF_MEMORY);
        values.push(reply.values.first().copied().unwrap_or(0));
        let held = before - witness.must("info");
        let charged = pages.charged(0);
        assert!(held <= charged, "{how:?}, {program}: {line}: {charged} charged, {held} held");
    }
    refused
}

#[test]
fn whatever_cannot_be_noted_is_refused() {
    let _alone = alone();
    for script in SCRIPTS {
        assert_eq!(play(script, &[]), 0, "{}: with memory for everything", script.0);
        for how in [1, 1_000_000] {
            let mut refused = 0;
            for first in 0..8 {
                refused += play(script, &[("STARVE_FROM", first), ("STARVE_COUNT", how)]);
            }
            assert!(refused > 0, "{}: nothing failed", script.0);
        }
    }
}

/// A thread forks while another one makes the first call, when the page that says where a process
/// stands is there, and not yet advised to be wiped in children. The child's own children would take
/// themselves for it.
#[test]
fn a_fork_in_the_middle_of_the_first_call_finds_no_page_that_stays() {
    let _alone = alone();
    let sim = SimGpu::start_default();
    let pages = Pages::create(&[(sim.uuid(0), 512 * MIB)]);
    let found = sim.scratch().join("found");
    let mut tenant = starved("calls", &sim, &pages, &[("STARVE_FORK", found.display())]);
    tenant.must("init 0");
    assert_eq!(std::fs::read_to_string(found).expect("the child's word"), "wiped");
    tenant.must("retain 0");
    tenant.must("alloc 8388608");
    assert_eq!(pages.charged(0), 8 * MIB);
}
