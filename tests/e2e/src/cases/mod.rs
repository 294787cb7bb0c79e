//! The cases, one function each.

pub mod delivery;
mod dra;
mod examples;
mod kubectl_tessera;
mod kubelet;
mod rollout;
mod trust;

use anyhow::Result;

use crate::suite::Suite;

pub struct Case {
    /// As it is named on the command line.
    pub name: &'static str,
    /// Whether the node's GPUs are all for claims in it, which share them.
    pub takes_claims: bool,
    /// The case itself. Whatever it leaves in the tenants' namespace is removed after it.
    pub run: fn(&Suite<'_>) -> Result<()>,
}

macro_rules! cases {
    ($($module:ident::$name:ident $($claims:ident)?),* $(,)?) => {
        &[$(Case {
            name: stringify!($name),
            takes_claims: cases!(@claims $($claims)?),
            run: $module::$name,
        }),*]
    };
    (@claims takes_claims) => { true };
    (@claims) => { false };
}

/// In the order in which they run: what later ones rely on comes first. Up to the rolling update the
/// plugin is as it was deployed; from then on it runs in a loop ([`crate::deploy::Plugin::supervise`]).
pub const CASES: &[Case] = cases![
    delivery::container_gets_shim_pages_and_preload,
    trust::over_quota_is_refused_and_described_and_the_neighbour_runs_on,
    delivery::pods_beyond_the_last_share_wait_and_get_what_is_freed_at_once,
    kubectl_tessera::kubectl_tessera_shows_and_steers_for_an_administrator,
    kubectl_tessera::kubectl_tessera_shows_readers_what_is_theirs,
    delivery::namespace_of_restricted_pods_admits_tenants,
    examples::manifests_are_what_the_api_server_takes,
    examples::kind_example_comes_up_and_serves_a_pod,
    trust::plugin_has_no_rights_to_speak_of,
    rollout::rolling_update_while_pods_come_and_run,
    delivery::cdi_annotations_give_all_or_nothing,
    kubelet::kubelet_restarts_in_the_middle_of_allocate,
    kubelet::node_reboot_keeps_every_pod_and_its_quota,
    dra::dra_claims_of_any_size_are_held_in_their_containers takes_claims,
    dra::dra_claim_that_does_not_fit_waits_for_room takes_claims,
    dra::dra_claims_fill_one_gpu_before_the_next takes_claims,
    dra::dra_two_shares_of_one_gpu_are_held_apart_or_add_up takes_claims,
    dra::dra_claim_is_shared_by_pods takes_claims,
    dra::dra_examples_run_as_they_are_written takes_claims,
    dra::dra_driver_is_away_while_pods_come_and_go takes_claims,
    dra::dra_kubelet_restarts_under_claims takes_claims,
    dra::dra_driver_is_updated_while_claims_come takes_claims,
    dra::dra_node_reboot_gives_every_claim_its_quota_again takes_claims,
    rollout::plugin_is_killed_at_random_moments_of_pod_churn,
    rollout::nothing_is_left_behind,
];
