//! What `status` warns of, with ages.

use tessera_peers::Counters;
use tessera_tenant::regions::Region;
use tessera_view::warning::{Found, GRAVE, PAST};

/// Something that stands, and is about what its text begins with: the rest may change from look to look.
pub(super) fn standing(text: String) -> Found {
    let key = text.split_once(": ").map_or(text.as_str(), |(subject, _)| subject).to_owned();
    Found { key, text, times: 0, shown: 0 }
}

/// What is wrong with a tenant, by its pages and sessions.
pub(super) fn of_tenant(id: &str, name: &str, region: &Region, counters: Counters) -> Vec<Found> {
    let mut found = Vec::new();
    if region.observed().stands() {
        found.push(Found {
            key: format!("{id} unaccounted"),
            text: format!(
                "{name}: holds device memory outside its account; the log says which process, and \
                 docs/trust.md what it may be"
            ),
            times: 0,
            shown: 0,
        });
    }
    let tampered = [(region.tamperings(), "its usage page was tampered with")];
    found.extend(counted(id, name, GRAVE, tampered));
    let behaviour = [
        (counters.garbage, "sends garbage to its session socket"),
        (counters.throttled, "floods its session socket and is slowed down"),
        (counters.turned_away, "opens too many sessions"),
        (counters.unknown_gpu, "sees a GPU that is not in its quota, and may not use it"),
        (counters.no_slot, "has more CUDA processes than there are slots"),
    ];
    found.extend(counted(id, name, PAST, behaviour));
    found
}

/// What a tenant did so many times.
pub(super) fn counted<const N: usize>(
    id: &str,
    name: &str,
    shown: i64,
    counts: [(u64, &'static str); N],
) -> impl Iterator<Item = Found> {
    let found = move |(times, text): (u64, &'static str)| Found {
        key: format!("{id} {text}"),
        text: format!("{name}: {text}"),
        times,
        shown,
    };
    counts.into_iter().filter(|(times, _)| *times > 0).map(found).collect::<Vec<_>>().into_iter()
}
