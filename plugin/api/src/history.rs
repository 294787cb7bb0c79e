//! What was: the recorder, which hands looks at everything to `tessera-history`, and answers from it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tessera_advice::Observed;
use tessera_config::{Advice, Config};
use tessera_history::{FlushError, Found, History, Key, Options, Series};
use tessera_model::audit::{self, What};
use tessera_model::clock::monotonic_ns;
use tessera_model::record::Holder;
use tessera_model::time_format;
use tessera_store::{HISTORY_KEPT, Lines, Trail};
use tessera_tenant::regions::Region;
use tessera_view::advice::{Recommendations, Scope, Waste};
use tessera_view::history::{Answer, Event, Query};
use tessera_view::node::Node;
use tessera_web::SourceError;

use crate::admin::StatusView;
use crate::explain::line;

/// Looks in a row that are left to the next one where the arbiter does not answer.
const UNHEARD: u32 = 5;

/// Records what the node does. All of it is blocking.
pub struct Recorder {
    view: Arc<StatusView>,
    history: History,
    /// Looks in a row that the arbiter did not answer.
    unheard: AtomicU32,
}

/// Where and how the history of a node with this configuration is kept.
pub fn options(config: &Config) -> Options {
    Options {
        path: tessera_history::beside(&config.paths.ledger),
        bound: config.history.size_bytes,
        keep: config.history.keep_seconds(),
        sync: config.ledger.fsync,
    }
}

impl Recorder {
    /// Of a node. Nothing is opened yet.
    pub fn new(view: Arc<StatusView>) -> Self {
        let history = History::new(options(&view.config()));
        Recorder { view, history, unheard: AtomicU32::new(0) }
    }

    /// Whether the configuration in force has it.
    pub fn is_on(&self) -> bool {
        self.view.config().history.enabled
    }

    /// Looks at everything once, changes nothing and waits for no tenant. The driver is asked for each GPU's memory in
    /// use. Where the arbiter does not answer, the next look is of this one's time as well: GPU time is spread over the
    /// time that it is of. One that stays silent is not waited for: memory goes on without it.
    pub fn look(&self) {
        let Some(agent) = self.view.agent.get().filter(|_| self.is_on()) else { return };
        let survey = self.view.survey(&Region::try_snapshot);
        let is_silent = survey.arbiter.is_none() && agent.allocations.arbiter().is_some();
        let unheard = if is_silent { self.unheard.fetch_add(1, Ordering::Relaxed) + 1 } else { 0 };
        if (1..=UNHEARD).contains(&unheard) {
            return;
        }
        self.unheard.store(0, Ordering::Relaxed);
        self.history.look(&survey.status, &survey.unread, monotonic_ns() / 1_000_000);
    }

    /// Stores what was seen, by the configuration in force; where it is off now, lets go of the file.
    pub fn flush(&self) -> Result<Option<Found>, FlushError> {
        if !self.is_on() {
            self.history.stop();
            return Ok(None);
        }
        self.history.set_options(options(&self.view.config()));
        self.name_gone();
        self.history.flush(false)
    }

    /// Stores everything and lets go of the file.
    pub fn close(&self) -> Result<(), FlushError> {
        self.name_gone();
        self.history.close()
    }

    /// Names tenants that ended before a look could see their names, by the audit trail.
    fn name_gone(&self) {
        let nameless = self.history.nameless();
        let Some(agent) = self.view.agent.get().filter(|_| !nameless.is_empty()) else { return };
        match agent.journal.read_trail(Trail::read) {
            Ok(lines) => self.history.name(&names(&lines, &nameless)),
            // They stay without names.
            Err(error) => tracing::debug!(%error, "the audit trail names nobody"),
        }
    }

    /// What was, with what happened. `now` is the node at this moment.
    pub(crate) fn history(&self, now: &Node, query: &Query) -> Result<Answer, SourceError> {
        let mut answer = self.figures(now, query)?;
        self.add_events(&mut answer, query);
        Ok(answer)
    }

    /// What to ask for instead.
    pub(crate) fn recommend(
        &self,
        now: &Node,
        scope: &Scope,
    ) -> Result<Recommendations, SourceError> {
        let figures = |query: &Query| self.figures(now, query);
        recommend(&figures, &self.view.config().advice, now, scope)
    }

    /// What is asked and not used.
    pub(crate) fn waste(&self, now: &Node, scope: &Scope) -> Result<Waste, SourceError> {
        let figures = |query: &Query| self.figures(now, query);
        waste(&figures, &self.view.config().advice, now, scope)
    }

    /// What was, without what happened.
    fn figures(&self, now: &Node, query: &Query) -> Result<Answer, SourceError> {
        if !self.is_on() {
            return Err(SourceError::Unavailable(
                "nothing is recorded: history.enabled is false".to_owned(),
            ));
        }
        self.name_gone();
        self.history.answer(query, now)
    }

    /// Adds to an answer what happened meanwhile.
    fn add_events(&self, answer: &mut Answer, query: &Query) {
        let Some(agent) = self.view.agent.get() else { return };
        match agent.journal.read_trail(Trail::read) {
            Ok(mut lines) => {
                // Happened, and not written yet.
                lines.events.extend(agent.journal.waiting_events());
                add(answer, query, &lines);
            }
            Err(error) => {
                answer.remarks.push(format!("the audit trail cannot be read: {error}"));
            }
        }
    }
}

/// A question to the history, whose answer needs no events: advice is judged by figures alone.
type Figures<'a> = dyn Fn(&Query) -> Result<Answer, SourceError> + 'a;

/// What to ask for instead.
fn recommend(
    figures: &Figures<'_>,
    settings: &Advice,
    now: &Node,
    scope: &Scope,
) -> Result<Recommendations, SourceError> {
    let scope = &since(now, scope, settings);
    // A workload is judged by all its pods.
    let history = figures(&window(scope))?;
    let observed = [Observed { node: now, history: &history }];
    let advice = tessera_advice::recommend(&observed, settings, scope);
    if advice.workloads.is_empty() && !scope.pod.is_empty() {
        let since = time_format::utc(scope.since_unix_ms);
        return Err(SourceError::NotFound(format!(
            "no pod {} has a share here, and none had one since {since}; without a name, the answer lists every \
             workload",
            scope.pod
        )));
    }
    Ok(advice)
}

/// What is asked and not used.
fn waste(
    figures: &Figures<'_>,
    settings: &Advice,
    now: &Node,
    scope: &Scope,
) -> Result<Waste, SourceError> {
    let scope = &since(now, scope, settings);
    let history = figures(&window(scope))?;
    let observed = [Observed { node: now, history: &history }];
    Ok(tessera_advice::waste(&observed, settings, scope))
}

/// With the beginning of the window that is meant.
fn since(now: &Node, scope: &Scope, settings: &Advice) -> Scope {
    let window = i64::try_from(settings.window.as_millis()).unwrap_or(i64::MAX);
    let since_unix_ms = match scope.since_unix_ms {
        0 => now.at_unix_ms.saturating_sub(window).max(1),
        since => since,
    };
    Scope { since_unix_ms, ..scope.clone() }
}

fn window(scope: &Scope) -> Query {
    let Scope { namespace, since_unix_ms, .. } = scope.clone();
    Query { namespace, since_unix_ms, ..Query::default() }
}

/// Most events of an answer, the newest.
const MOST: usize = 1000;

/// What the lines call these tenants, by id and generation. A later line counts.
fn names(trail: &Lines, of: &BTreeSet<(String, u64)>) -> Vec<Series> {
    let named = trail.events.iter().filter_map(|event| {
        let (id, holder) = (event.id.as_ref()?.to_string(), event.holder.clone()?);
        let key = Key { id, generation: event.generation, gpu_uuid: String::new() };
        let is_asked = of.contains(&(key.id.clone(), key.generation));
        let Holder { namespace, pod, container } = holder;
        is_asked.then(|| (key.clone(), Series { key, namespace, pod, container }))
    });
    named.collect::<BTreeMap<Key, Series>>().into_values().collect()
}

/// Whether the answer is of everything on the node.
fn is_of_all(query: &Query) -> bool {
    query.subject.trim().is_empty() && query.namespace.is_empty()
}

/// The time that events are of, Unix milliseconds.
fn time_of(answer: &Answer, query: &Query) -> RangeInclusive<i64> {
    let since = match query.since_unix_ms {
        0 => answer.since_unix_ms,
        since => since,
    };
    match query.until_unix_ms {
        0 => since..=i64::MAX,
        until => since..=until,
    }
}

/// Adds to an answer what happened meanwhile to what is in it: of a tenant its own lines, of a GPU its own and the
/// node's. `trail` has all lines. That the trail begins later than the answer is remarked.
fn add(answer: &mut Answer, query: &Query, trail: &Lines) {
    let pods: HashMap<(&str, u64), (&str, &str)> = answer
        .tenants
        .iter()
        .map(|one| ((one.id.as_str(), one.generation), (one.namespace.as_str(), one.pod.as_str())))
        .collect();
    let is_all = is_of_all(query);
    let window = time_of(answer, query);
    let mut events = Vec::new();
    for event in trail.events.iter().filter(|event| window.contains(&event.at_unix_ms)) {
        let known = match &event.id {
            Some(id) => match pods.get(&(id.as_str(), event.generation)) {
                Some(pod) => Some(*pod),
                None if is_all => None,
                None => continue,
            },
            None => {
                let on = event.gpu.as_deref();
                let is_its = match on {
                    Some(uuid) => answer.gpus.iter().any(|gpu| gpu.gpu_uuid == uuid),
                    // Of the node: with a GPU's, or everything's.
                    None => !answer.gpus.is_empty(),
                };
                if !is_its && !is_all {
                    continue;
                }
                None
            }
        };
        events.push(described(event, known));
    }
    events.drain(..events.len().saturating_sub(MOST));
    if let Some(first) = trail.since_unix_ms
        && first > *window.start()
        && answer.since_unix_ms < first
        && trail.kept as u64 >= HISTORY_KEPT
    {
        let first = tessera_model::time_format::utc(first);
        answer.remarks.push(format!("events before {first} are no longer in the audit trail"));
    }
    answer.events = events;
}

/// A line in words, as `explain` has it.
fn described(event: &audit::Event, pod: Option<(&str, &str)>) -> Event {
    let line = line(event);
    let holder =
        event.holder.as_ref().map(|holder| (holder.namespace.as_str(), holder.pod.as_str()));
    let pod = holder.or(pod.filter(|(_, pod)| !pod.is_empty()));
    let is_operators = matches!(event.by, Some(audit::Actor::Admin { .. }));
    let event = Event {
        at_unix_ms: event.at_unix_ms,
        what: line.what,
        tenant: line.allocation_id,
        pod: pod.map(|(namespace, pod)| format!("{namespace}/{pod}")).unwrap_or_default(),
        gpu_uuid: match &event.what {
            What::QuotaSet { after, .. } | What::QuotaReset { after, .. } if after.len() == 1 => {
                after[0].uuid.clone()
            }
            _ => line.gpu_uuid,
        },
        text: String::new(),
        happened: line.text,
        reason: line.reason,
        reason_is_own: line.reason_is_own,
        behind: line.behind,
        by: if is_operators { line.by } else { String::new() },
    };
    Event { text: event.sentence(), ..event }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::time::Duration;

    use tessera_model::allocation_id::AllocationId;
    use tessera_model::audit::Event as Line;
    use tessera_view::history::{GpuSeries, TenantPoint, TenantSeries};

    use super::*;

    const HOUR: i64 = 3_600_000;

    fn settings() -> Advice {
        Advice { window: Duration::from_secs(10 * 3600), ..Advice::default() }
    }

    /// A pod that had a share for an hour.
    fn made() -> Answer {
        let point = TenantPoint {
            at_unix_ms: 100 * HOUR,
            seconds: 3600.0,
            memory_peak_bytes: 1 << 30,
            memory_limit_bytes: 8 << 30,
            cores_millis: 250,
            ..TenantPoint::default()
        };
        let series = TenantSeries {
            namespace: "team".into(),
            pod: "chat-0".into(),
            points: vec![point],
            ..TenantSeries::default()
        };
        Answer { tenants: vec![series], ..Answer::default() }
    }

    fn now() -> Node {
        Node { at_unix_ms: 101 * HOUR, ..Node::default() }
    }

    #[test]
    fn the_window_is_the_settings_where_none_is_asked_for() {
        let asked = RefCell::<Vec<Query>>::default();
        let figures = |query: &Query| {
            asked.borrow_mut().push(query.clone());
            Ok(made())
        };
        let scope = Scope { pod: "chat-0".into(), namespace: "team".into(), ..Scope::default() };
        let advice = recommend(&figures, &settings(), &now(), &scope).unwrap();
        assert_eq!(advice.workloads[0].workload, "chat");
        assert_eq!(advice.workloads[0].since_unix_ms, 91 * HOUR);
        let scope = Scope { since_unix_ms: 7, ..scope };
        let waste = waste(&figures, &settings(), &now(), &scope).unwrap();
        assert_eq!((waste.since_unix_ms, waste.namespaces.len()), (7, 1));
        let asked = asked.into_inner();
        let windows: Vec<i64> = asked.iter().map(|query| query.since_unix_ms).collect();
        assert_eq!(windows, [91 * HOUR, 7]);
        // Its neighbours of the same workload are looked at, too.
        assert!(asked.iter().all(|query| query.subject.is_empty() && query.namespace == "team"));
    }

    #[test]
    fn a_pod_that_nobody_knows_is_named() {
        let scope = Scope { pod: "chta-0".into(), ..Scope::default() };
        let error = recommend(&|_| Ok(made()), &settings(), &now(), &scope).unwrap_err();
        let SourceError::NotFound(text) = error else { panic!("{error}") };
        assert!(text.contains("no pod chta-0 has a share here"), "{text}");
    }

    fn answer() -> Answer {
        let tenant = TenantSeries {
            id: "a".repeat(32),
            generation: 2,
            namespace: "ns".into(),
            pod: "p".into(),
            ..TenantSeries::default()
        };
        Answer { tenants: vec![tenant], since_unix_ms: 10, ..Answer::default() }
    }

    fn line(id: &str, generation: u64, at_unix_ms: i64) -> Line {
        let id = AllocationId::parse(&id.repeat(32));
        Line { id, generation, ..Line::of_node(What::Started, at_unix_ms) }
    }

    fn add_from(answer: &mut Answer, query: &Query, trail: &[Line]) {
        add(answer, query, &Lines { events: trail.to_vec(), ..Lines::default() });
    }

    fn found(answer: &Answer) -> Vec<(&str, i64, &str)> {
        let events = answer.events.iter();
        events.map(|event| (event.what.as_str(), event.at_unix_ms, event.pod.as_str())).collect()
    }

    #[test]
    fn a_tenants_answer_has_its_own_lines_of_its_window() {
        let trail = [
            line("a", 2, 5),
            line("a", 1, 20),
            line("a", 2, 30),
            line("b", 2, 30),
            Line::of_node(What::Cordoned, 30),
        ];
        let mut one = answer();
        add_from(&mut one, &Query { subject: "p".into(), ..Query::default() }, &trail);
        assert_eq!(found(&one), [("started", 30, "ns/p")]);
        let mut all = answer();
        add_from(&mut all, &Query::default(), &trail);
        assert_eq!(all.events.len(), 4);
        let until = Query { since_unix_ms: 1, until_unix_ms: 9, ..Query::default() };
        add_from(&mut all, &until, &trail);
        assert_eq!(found(&all), [("started", 5, "ns/p")]);
    }

    #[test]
    fn the_last_line_that_names_a_tenant_names_it() {
        let named = |id: &str, generation, pod: &str| {
            let holder =
                Holder { namespace: "ns".into(), pod: pod.into(), container: "main".into() };
            Line { holder: Some(holder), ..line(id, generation, 1) }
        };
        let events = vec![
            named("a", 1, "first"),
            named("a", 2, "other"),
            line("a", 2, 1),
            named("a", 2, "job-0"),
            named("b", 2, "job-1"),
        ];
        let trail = Lines { events, ..Lines::default() };
        let found = names(&trail, &[("a".repeat(32), 2), ("c".repeat(32), 1)].into());
        let found: Vec<_> = found.iter().map(|one| (&*one.namespace, &*one.pod)).collect();
        assert_eq!(found, [("ns", "job-0")]);
    }

    #[test]
    fn a_gpus_answer_has_the_nodes_lines_and_a_namespaces_has_none_of_others() {
        let gpu = GpuSeries { gpu_uuid: "GPU-a".into(), ..GpuSeries::default() };
        let mut one = Answer { gpus: vec![gpu], ..answer() };
        let sick = |uuid: &str| Line::of_gpu(uuid, What::Cordoned, "XID 79".into(), 40);
        let trail =
            [sick("GPU-a"), sick("GPU-b"), Line::of_node(What::Cordoned, 41), line("b", 1, 50)];
        add_from(&mut one, &Query { subject: "0".into(), ..Query::default() }, &trail);
        assert_eq!(found(&one), [("cordoned", 40, ""), ("cordoned", 41, "")]);
        assert!(one.events[0].text.ends_with("do not get it: XID 79"), "{}", one.events[0].text);
        let mut narrow = answer();
        add_from(&mut narrow, &Query { namespace: "ns".into(), ..Query::default() }, &trail);
        assert_eq!(found(&narrow), []);
    }
}
