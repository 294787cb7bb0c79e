//! Finding functions under the shim: the driver's, look-alikes, and beside other preloaded libraries.

use crate::quota;
use tessera_cuda::hooks::HOOKS;
use tessera_harness::routing::Answers;
use tessera_harness::{CProgram, MIB, Pages, Preloaded, SimGpu, artefacts, compile_c};

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
