//! Other libraries preloaded beside the shim, before and after it: allocators, and hooks of `dlsym`.

use crate::{OUT_OF_MEMORY, quota, ready};
use std::path::Path;
use std::time::Duration;
use tessera_cuda::hooks::HOOKS;
use tessera_harness::routing::Answers;
use tessera_harness::{
    CProgram, MIB, Pages, Preloaded, SimGpu, artefacts, can_contain, compile_c, external,
};

/// Both orders of `LD_PRELOAD`.
fn orders(other: &Path) -> [String; 2] {
    let (shim, other) = (artefacts().shim(), other.display().to_string());
    [format!("{}:{other}", shim.display()), format!("{other}:{}", shim.display())]
}

/// Threads, forks among them, driver calls, refusals, and an end while threads allocate.
fn serves_with(other: &Path) {
    for preload in orders(other) {
        let (sim, pages) = quota(64 * MIB);
        let under = |program: &str| {
            let program = Preloaded::new(compile_c(program)).sim(&sim).pages(&pages);
            program.env("LD_PRELOAD", &preload).timeout(Duration::from_secs(60))
        };
        for what in ["fork", "late", "many"] {
            let out = under("unruly").arg(what).run();
            assert!(out.success(), "{preload}: {out}");
            assert_eq!(out.value("failures"), "0 usable 1", "{preload}: {out}");
            assert_eq!(out.stderr, "", "{preload}");
        }
        for what in ["exit", "_exit"] {
            let out = under("unruly").arg(what).run();
            assert!(out.success(), "{preload} {what}: {out}");
        }
        let mut tenant = ready(under("calls"));
        tenant.must("alloc 33554432");
        assert_eq!(tenant.ask("alloc 33554433").result, OUT_OF_MEMORY, "{preload}");
        tenant.finish();
        assert_eq!(pages.charged(0), 0, "{preload}");
    }
}

#[test]
fn allocators_of_others_serve_before_and_behind_the_shim() {
    let root = external::or_skip(external::fetched("allocators"), "preloaded allocators");
    let Some(root) = root else { return };
    for library in ["libjemalloc.so.2", "libmimalloc.so.2.0", "libtcmalloc_minimal.so.4"] {
        serves_with(&root.join("usr/lib/x86_64-linux-gnu").join(library));
    }
}

#[test]
fn behind_the_shim_a_dlsym_of_somebody_else_changes_nothing() {
    let (sim, pages) = quota(64 * MIB);
    let [behind, before] = orders(&CProgram::new("dlsym_hook").shared().build());
    let under = |preload: &str, program: &Path| {
        let program = Preloaded::new(program).sim(&sim).pages(&pages);
        program.env("LD_PRELOAD", preload)
    };
    let refused = |preload: &str, program: &Path| {
        let mut tenant = ready(under(preload, program));
        let refused = tenant.ask("alloc 67108865").result == OUT_OF_MEMORY;
        assert!(tenant.finish().success(), "{preload}");
        refused
    };
    let (dlsym, linked) = (compile_c("calls"), CProgram::new("calls").flag("-DLINKED"));
    let linked = linked.links_driver().build();
    assert!(refused(&behind, &dlsym));
    assert!(refused(&behind, &linked));
    // Before the shim it answers first, and from libc, past the shim: a limit, docs/internals/shim.md. What
    // reaches the driver in other ways is held.
    assert!(refused(&before, &linked));
    assert!(!refused(&before, &dlsym), "no limit any more? then docs/internals/shim.md is behind");
}

#[test]
fn an_empty_environment_does_not_shake_the_shim_off() {
    let test = "a container's program in an empty environment";
    if external::or_skip(can_contain(), test).is_none() {
        return;
    }
    let (sim, container) = (SimGpu::start_default(), tempfile::tempdir().unwrap());
    let _pages = Pages::share(container.path(), "0123456789abcdef", &[(sim.uuid(0), 64 * MIB)]);
    let mut program = Preloaded::new("/usr/bin/env").in_container(container.path()).arg("-i");
    // The simulated driver is found by its path; an image's would be in the loader's cache.
    for (name, value) in sim.envs() {
        program = program.arg(format!("{name}={value}"));
    }
    let mut tenant = ready(program.arg(compile_c("calls")));
    assert_eq!(tenant.ask("alloc 67108865").result, OUT_OF_MEMORY);
    tenant.must("alloc 67108864");
}

// Finding functions under the shim: the driver's, look-alikes, and beside other preloaded libraries.

fn shared(name: &str) -> std::path::PathBuf {
    CProgram::new(name).shared().build()
}

#[test]
fn every_lookup_on_the_simulated_driver_reaches_its_hook() {
    let sim = SimGpu::start_default();
    let program = compile_c("routing");
    let bare = Answers::of(Preloaded::bare(&program).sim(&sim));
    let reached = bare.check_routing(&Answers::of(Preloaded::new(&program).sim(&sim)));
    // The simulator may leave out what no client of today calls, never the newer forms.
    for hook in HOOKS.iter().filter(|hook| hook.since > 3_000) {
        assert!(reached.contains(hook.export), "no look-up led to {}", hook.export);
    }
}

#[test]
fn names_that_only_resemble_the_drivers_are_left_alone() {
    let impostor = shared("impostor");
    let bare = Preloaded::bare(compile_c("names")).arg(&impostor).run();
    let shim = Preloaded::new(compile_c("names")).arg(&impostor).run();
    assert!(bare.success(), "{bare}");
    assert_eq!(shim.stdout, bare.stdout);
    assert_eq!(shim.stderr, "");
    assert_eq!(shim.value("calls"), "4242 4243 4244");
}

#[test]
fn an_unrelated_library_stays_itself_while_the_driver_is_in_use() {
    let (sim, pages) = quota(64 * MIB);
    let impostor = shared("impostor");
    // Preloaded after the shim, its cuInit is even in the global scope.
    let preload = format!("{}:{}", artefacts().shim().display(), impostor.display());
    let program = Preloaded::new(compile_c("names")).sim(&sim).pages(&pages);
    let out = program.env("LD_PRELOAD", preload).arg(&impostor).run();
    assert!(out.success(), "{out}");
    assert_eq!(out.value("calls"), "4242 4243 4244");
}

#[test]
fn the_quota_holds_beside_another_preloaded_wrapper() {
    let sim = SimGpu::start_default();
    let program = CProgram::new("beside").links_driver().build();
    let (shim, wrapper) = (artefacts().shim(), shared("wrapper"));
    let (shim, wrapper) = (shim.display(), wrapper.display());
    for (preload, counted) in
        // First, the wrapper sees each call and hands it on to the shim; behind it, it sees none.
        [(format!("{wrapper}:{shim}"), 2), (format!("{shim}:{wrapper}"), 0)]
    {
        let pages = Pages::create(&[(sim.uuid(0), 64 * MIB)]);
        let out = Preloaded::new(&program)
            .sim(&sim)
            .pages(&pages)
            .env("LD_PRELOAD", &preload)
            .arg((16 * MIB).to_string())
            .arg((100 * MIB).to_string())
            .run();
        assert!(out.success(), "{preload}: {out}");
        assert_eq!((out.number("fits"), out.number("beyond")), (0, 2), "{preload}: {out}");
        // RTLD_NEXT in the wrapper was answered from the wrapper's own place.
        assert_eq!(out.number("parent"), 1, "{preload}: {out}");
        assert_eq!(out.number("counted"), counted, "{preload}: {out}");
    }
}
