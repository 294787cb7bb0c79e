//! Resolves a pod's or an allocation's name to an allocation.

use std::sync::Arc;

use super::steer::SteerError;
use super::{Allocations, room};
use tessera_model::allocation_id::AllocationId;
use tessera_model::record::Record;
use tessera_view::change::Target;

/// The namespace and the pod that it means, unless it names an allocation.
fn pod(target: &Target) -> Result<(&str, &str), SteerError> {
    let (namespace, pod) = target.name.split_once('/').unwrap_or(("", &target.name));
    let other = target.namespace.as_str();
    let invalid = |text: String| Err(SteerError::Invalid(text));
    if pod.is_empty() || target.name.starts_with('/') {
        return invalid("name a pod (`name` or `namespace/name`) or an allocation".to_owned());
    }
    match (namespace, other) {
        ("", other) => Ok((other, pod)),
        (one, other) if other.is_empty() || one == other => Ok((one, pod)),
        (_, other) => {
            invalid(format!("{} is not in the namespace {other}; name one of them", target.name))
        }
    }
}

fn matches(target: &Target, record: &Record) -> Result<bool, SteerError> {
    if record.id.as_str() == target.name {
        return Ok(true);
    }
    let (namespace, pod) = pod(target)?;
    let namespace = Some(namespace).filter(|namespace| !namespace.is_empty());
    let container = target.container.as_str();
    let is_claim = record.origin.claim().is_some_and(|claim| {
        claim.name == pod && namespace.is_none_or(|name| name == claim.namespace)
    });
    Ok(is_claim && container.is_empty()
        || record.holders().any(|holder| {
            holder.is_of(namespace, pod) && (container.is_empty() || container == holder.container)
        }))
}

impl Allocations {
    /// The one live allocation that is meant.
    pub fn find(&self, target: &Target) -> Result<Arc<Record>, SteerError> {
        let records: Vec<Arc<Record>> = self.records.lock().values().cloned().collect();
        choose(&records, target)
    }
}

fn choose(records: &[Arc<Record>], target: &Target) -> Result<Arc<Record>, SteerError> {
    let mut found = Vec::new();
    let mut parked = None;
    for record in records {
        match matches(target, record)? {
            true if record.is_live() => found.push(record),
            true => parked = Some(record),
            false => {}
        }
    }
    match (found.as_slice(), parked) {
        ([one], _) => Ok(Arc::clone(one)),
        ([], Some(record)) => Err(SteerError::Refused(format!(
            "{} holds nothing any more: its replicas went to another allocation",
            describe(record)
        ))),
        ([], None) => match beginning(records, target).as_slice() {
            [] => Err(SteerError::NotFound(nothing(records, target))),
            [one] => Ok(Arc::clone(one)),
            several => Err(SteerError::Invalid(format!(
                "{} begins several ids; write more of it: {}",
                target.name,
                list(several)
            ))),
        },
        (several, _) => {
            let list = list(several);
            let name = &target.name;
            Err(SteerError::Invalid(format!(
                "{name} may be any of {list}; add --container or --namespace, or name the allocation"
            )))
        }
    }
}

/// Fewest characters of an id's beginning.
const BEGINNING: usize = 4;

/// Live allocations whose ids begin so, where nothing is called so.
fn beginning<'r>(records: &'r [Arc<Record>], target: &Target) -> Vec<&'r Arc<Record>> {
    let begins = |record: &&Arc<Record>| {
        target.name.len() >= BEGINNING && record.id.as_str().starts_with(&target.name)
    };
    records.iter().filter(|record| record.is_live()).filter(begins).collect()
}

fn nothing(records: &[Arc<Record>], target: &Target) -> String {
    let live: Vec<&Arc<Record>> = records.iter().filter(|record| record.is_live()).collect();
    if AllocationId::parse(&target.name).is_some() {
        return format!("no allocation {}; `tessera status` lists what there is", target.name);
    }
    let named: Vec<&Arc<Record>> =
        live.iter().copied().filter(|record| record.holder.is_some()).collect();
    let mut text = format!("no container of a pod {} holds a GPU on this node", target.name);
    if !named.is_empty() {
        text.push_str(&format!("; these do: {}", list(&named)));
    }
    match live.len() - named.len() {
        0 => {}
        n => text.push_str(&format!(
            "; of {n} allocations kubelet has not said who holds them: name them by their ids, as \
             `tessera status` shows them"
        )),
    }
    text
}

fn list(records: &[&Arc<Record>]) -> String {
    room::list(&records.iter().map(|record| describe(record)).collect::<Vec<_>>())
}

/// An allocation as a person finds it again.
pub(super) fn describe(record: &Record) -> String {
    match &record.holder {
        Some(holder) => format!(
            "{}/{} container {} (allocation {})",
            holder.namespace, holder.pod, holder.container, record.id
        ),
        None => format!("allocation {}", record.id),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_model::record::{Holder, State};

    fn record(replica: &str, holder: Option<[&str; 3]>) -> Arc<Record> {
        let holder = holder.map(|[namespace, pod, container]| Holder {
            namespace: namespace.into(),
            pod: pod.into(),
            container: container.into(),
        });
        Arc::new(Record {
            resource: "r".into(),
            replicas: vec![replica.into()],
            state: State::Started,
            holder,
            ..Record::new(AllocationId::of("r", [replica]), 1, Vec::new())
        })
    }

    fn records() -> Vec<Arc<Record>> {
        vec![
            record("0", Some(["one", "llm", "main"])),
            record("1", Some(["one", "llm", "side"])),
            record("2", Some(["two", "llm", "main"])),
            record("3", Some(["two", "web", "main"])),
            record("4", None),
        ]
    }

    fn find(
        name: &str,
        namespace: Option<&str>,
        container: Option<&str>,
    ) -> Result<String, String> {
        let target = Target {
            name: name.into(),
            namespace: namespace.unwrap_or_default().into(),
            container: container.unwrap_or_default().into(),
        };
        let found = choose(&records(), &target).map_err(|error| error.to_string())?;
        Ok(found.replicas[0].clone())
    }

    #[test]
    fn a_pod_is_named_as_exactly_as_it_must_be() {
        assert_eq!(find("web", None, None), Ok("3".into()));
        assert_eq!(find("two/llm", None, None), Ok("2".into()));
        assert_eq!(find("llm", Some("two"), None), Ok("2".into()));
        assert_eq!(find("one/llm", None, Some("side")), Ok("1".into()));
        let id = AllocationId::of("r", ["4"]);
        assert_eq!(find(id.as_str(), None, None), Ok("4".into()));
    }

    #[test]
    fn a_short_id_as_status_shows_it_is_enough_and_a_pods_name_goes_before() {
        let id = AllocationId::of("r", ["4"]).to_string();
        assert_eq!(find(&id[..8], None, None), Ok("4".into()));
        assert!(find(&id[..3], None, None).is_err());
        let ids: Vec<_> = (0..40).map(|n| record(&n.to_string(), None)).collect();
        let target = Target { name: ids[0].id.as_str()[..4].to_owned(), ..Target::default() };
        let mut named = vec![record("pod", Some(["ns", &target.name, "main"]))];
        named.extend(ids);
        assert_eq!(choose(&named, &target).unwrap().replicas, ["pod"]);
    }

    #[test]
    fn what_several_match_is_refused_with_their_names() {
        let error = find("llm", None, None).unwrap_err();
        for name in ["one/llm container main", "one/llm container side", "two/llm container main"] {
            assert!(error.contains(name), "{error}");
        }
        assert!(error.contains("--container or --namespace"), "{error}");
        assert!(!error.contains("web"), "{error}");
        assert!(find("llm", None, Some("side")).is_ok());
    }

    #[test]
    fn what_nothing_matches_is_refused_with_what_there_is() {
        let error = find("lllm", None, None).unwrap_err();
        assert!(error.contains("these do: one/llm container main"), "{error}");
        assert!(error.contains("of 1 allocations kubelet has not said"), "{error}");
        assert!(find("three/llm", None, None).unwrap_err().starts_with("no container of a pod"));
        assert!(find(&"0".repeat(32), None, None).unwrap_err().starts_with("no allocation 000"));
        assert!(find("", None, None).unwrap_err().contains("name a pod"));
        assert!(find("one/llm", Some("two"), None).unwrap_err().contains("not in the namespace"));
    }
}
