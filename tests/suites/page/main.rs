//! The page in Chromium, before a server over a made-up fleet: `checks/` has a Python function for each test here.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::OnceLock;

use tessera_harness::external;

fn check(name: &str) {
    // Tests of one process would wait for each other's installation one by one.
    static TOOLS: OnceLock<Result<(PathBuf, PathBuf), String>> = OnceLock::new();
    let tools = || Ok((external::python_of("page-tools")?, external::fetched("chromium")?));
    let (python, chromium) = match TOOLS.get_or_init(tools) {
        Ok(tools) => tools,
        Err(reason) => return external::skip(name, reason),
    };
    let environment = [
        ("PAGE_SERVER", OsStr::new(env!("CARGO_BIN_EXE_tessera-page-server"))),
        ("CHROMIUM", chromium.as_os_str()),
    ];
    external::check(python, "tests/suites/page/checks/run.py", name, &environment);
}

macro_rules! checks {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() {
            check(stringify!($name));
        }
    )*};
}

checks! {
    fleet
    bars
    gpu
    history
    timeline
    pod
    namespaces
    filters
    keyboard
    live
    many
    node_away
    stream_lost
    clocks
    token
    namespace
    empty
    hostile
    hostile_narrow
    hostile_history
    access_light
    access_narrow_dark
    large
    formats
    events
}
