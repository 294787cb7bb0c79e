//! What `status` warns of, with ages.

use tessera_arbiter::TenantShare;
use tessera_model::audit::{Event, What};
use tessera_tenant::regions::Region;
use tessera_view::warning::{Found, GRAVE, PAST};

/// Something that stands, and is about what its text begins with: the rest may change from look to look.
pub(super) fn standing(text: String) -> Found {
    let key = text.split_once(": ").map_or(text.as_str(), |(subject, _)| subject).to_owned();
    Found { key, text, times: 0, shown: 0 }
}

/// What is wrong with a tenant, by its pages, its sessions and its gate.
pub(super) fn of_tenant(
    id: &str,
    name: &str,
    region: Option<&Region>,
    share: Option<&TenantShare>,
) -> Vec<Found> {
    let mut found = Vec::new();
    let mut add = |times, shown, text: &str| {
        let (key, text) = (format!("{id} {text}"), format!("{name}: {text}"));
        found.push(Found { key, text, times, shown });
    };
    let counters = region.map(|region| region.tenant().counters()).unwrap_or_default();
    if region.is_some_and(|region| region.observed().stands()) {
        add(0, 0, &told(What::Unaccounted));
    }
    let tampered = told(What::Tampered { what: "usage page".to_owned() });
    let (violations, overlaps) =
        share.map(|share| (share.violations, share.totals.overlaps)).unwrap_or_default();
    let counted = [
        (region.map_or(0, Region::tamperings), GRAVE, tampered.as_str()),
        (counters.garbage, PAST, "sends garbage to its session socket"),
        (counters.throttled, PAST, "floods its session socket and is slowed down"),
        (counters.turned_away, PAST, "opens too many sessions"),
        (counters.unknown_gpu, PAST, "sees a GPU that is not in its quota, and may not use it"),
        (counters.no_slot, PAST, "has more CUDA processes than there are slots"),
        (violations.garbage, PAST, "sends garbage to its gate socket"),
        (violations.nonsense, PAST, "sends its gate messages that make no sense there"),
        (violations.throttled, PAST, "floods its gate socket and is slowed down"),
        (violations.turned_away, PAST, "opens too many connections to its gate"),
        (overlaps, PAST, &told(What::Overlapped)),
    ];
    for (times, shown, text) in counted {
        if times > 0 {
            add(times, shown, text);
        }
    }
    found
}

/// As the audit trail has it, and what to do.
fn told(what: What) -> String {
    let event = Event::of_node(what, 0);
    format!("{}. {}", event.sentence("the GPU"), event.advice())
}
