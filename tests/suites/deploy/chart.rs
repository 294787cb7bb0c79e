//! What lies in `deploy/`, checked by `tests/deploy/checks.py` with Helm's own engine: `helm` where it is
//! installed, else as a library.

use std::path::PathBuf;
use std::sync::OnceLock;

use nix::unistd::geteuid;
use tessera_harness::{artefacts, external};

/// Runs a check, which finds these programs by these variables.
pub(crate) fn check(name: &str, tools: &[(&str, PathBuf)]) {
    // Tests of one process would wait for each other's installation one by one.
    static PYTHON: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let python = match PYTHON.get_or_init(|| external::python_of("deploy-tools")) {
        Ok(python) => python,
        Err(reason) => return external::skip(name, reason),
    };
    let tessera = artefacts().tessera();
    let tools = tools.iter().map(|(variable, path)| (*variable, path.as_os_str()));
    let environment: Vec<_> = tools.chain([("TESSERA", tessera.as_os_str())]).collect();
    external::check(python, "tests/deploy/checks.py", name, &environment);
}

macro_rules! checks {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() {
            check(&stringify!($name).replace('_', "-"), &[]);
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
    dra_has_its_rights_sockets_and_classes
    device_classes_select_what_they_say
    slices_of_other_nodes_are_refused_by_the_policy
    claims_that_would_loosen_a_limit_are_refused_by_the_policy
    examples_of_dra_name_what_there_is
    autoscalers_use_metrics_that_there_are
    app_armor_is_a_field_where_there_is_one
    host_paths_are_mounted_where_the_configuration_has_them
    a_change_of_the_configuration_restarts_only_on_request
    sandboxed_pods_are_refused_by_the_policy
    volumes_over_what_a_container_is_given_are_refused_by_the_policy
    alerts_and_dashboard_are_those_of_the_repository
    every_alert_has_its_runbook
    metrics_of_alerts_and_dashboard_are_documented
    every_scrape_names_the_node
    down_targets_are_found_by_their_job
    dashboard_is_readable
    workflows_are_pinned_and_whole
    release_versions_agree
    release_names_are_taken_by_registries
    chart_is_packaged_whole
    a_release_that_failed_midway_can_be_run_again
    krew_manifest_fits_its_archives
    icon_is_the_files
    node_configs_are_chosen_by_label
    a_config_map_of_ones_own_is_mounted
    security_contexts_are_laid_over_the_charts
    values_that_cannot_work_are_refused
    chart_and_plugin_agree_between_keys
    events_that_are_off_are_off_for_the_plugin_too
    readiness_is_asked_where_the_plugin_listens
    cdi_specs_are_mounted_and_cleaned_where_the_configuration_has_them
    the_api_server_is_reached_at_its_ports
    names_that_look_like_numbers_stay_strings
    values_of_an_older_chart_are_met_with_advice
    releases_share_no_pods
    every_release_name_makes_names_that_kubernetes_takes
    every_container_names_its_resources
    kubelet_is_met_below_any_root
    notes_name_what_there_is
    documented_commands_work
    documented_blocks_end
    named_commands_are_there
    documented_values_and_configurations_are_accepted
    dockerfile
}

/// Prometheus' judge of rules: the installed one, else Debian's.
fn with_promtool(name: &str) {
    match external::program("promtool", "prometheus") {
        Ok(promtool) => check(name, &[("PROMTOOL", promtool)]),
        Err(reason) => external::skip(name, &reason),
    }
}

#[test]
fn rules_pass_promtool() {
    with_promtool("rules-pass-promtool");
}

#[test]
fn dashboard_passes_promtool() {
    with_promtool("dashboard-passes-promtool");
}

#[test]
fn alerts_fire_when_they_should() {
    with_promtool("alerts-fire-when-they-should");
}

#[test]
fn alerts_on_counters_miss_nothing_and_repeat_nothing() {
    with_promtool("alerts-on-counters-miss-nothing-and-repeat-nothing");
}

// The image: buildah builds `deploy/Dockerfile` from a stand-in of its base image (`tests/deploy/image.py`).

/// The installed buildah. It must be able to mount, so it needs root.
fn buildah() -> Result<PathBuf, String> {
    if !geteuid().is_root() {
        return Err("buildah makes images as root only in this test".to_owned());
    }
    external::fetched("buildah")
}

#[test]
fn image_is_built_in_layers() {
    match buildah() {
        Ok(path) => check("image-is-built-in-layers", &[("BUILDAH", path)]),
        Err(reason) => external::skip("image_is_built_in_layers", &reason),
    }
}

#[test]
fn image_skeleton_is_a_workspace() {
    check("image-skeleton-is-a-workspace", &[]);
}
