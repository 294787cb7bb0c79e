//! What lies in `deploy/`, checked by `tests/deploy/checks.py` with Helm's own engine: `helm` where it is
//! installed, else as a library.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use tessera_tests::{artefacts, external, workspace};

fn check(name: &str) {
    // Tests of one process would wait for each other's installation one by one.
    static PYTHON: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let python = match PYTHON.get_or_init(external::deploy_tools) {
        Ok(python) => python,
        Err(reason) => return external::skip(name, reason),
    };
    let out = Command::new(python)
        .arg("-B")
        .arg(workspace().join("tests/deploy/checks.py"))
        .arg(name)
        .env("TESSERA", artefacts().tessera())
        .output()
        .expect("the environment's Python");
    let said = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && said.contains("done"), "{said}");
}

macro_rules! checks {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() {
            check(&stringify!($name).replace('_', "-"));
        }
    )*};
}

checks! {
    rendered_files
    lint
    schema_is_strict
    every_value_is_documented
    nothing_on_the_network_can_restart_the_plugin
    namespace_default_is_refused
    configurations_are_valid
    configuration_is_carried_over_exactly
    profiles_share_no_node
    gates
    least_privilege
    app_armor_is_a_field_where_there_is_one
    host_paths_are_mounted_where_the_configuration_has_them
    a_change_of_the_configuration_restarts_only_on_request
    sandboxed_pods_are_refused_by_the_policy
    volumes_over_what_a_container_is_given_are_refused_by_the_policy
    alerts_and_dashboard_are_those_of_the_repository
    dockerfile
}
