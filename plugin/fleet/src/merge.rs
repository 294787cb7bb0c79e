//! Answers of several nodes as one. Pure.

use std::collections::BTreeMap;

use tessera_view::advice::{NamespaceWaste, Waste};
use tessera_view::explain::{Explanation, Explanations};
use tessera_view::{API_VERSION, history};

use crate::answer::{AskError, Why};
use crate::entries::ahead;

/// Answers by node, and a sentence for each node without one.
pub type Answered<T> = (Vec<(String, T)>, Vec<String>);

/// What those say that answered, and a sentence for each that did not; an error where none did: the one of a node
/// that knows what was asked for, if there is such.
pub fn answered<T>(answers: Vec<(String, Result<T, AskError>)>) -> Result<Answered<T>, AskError> {
    if answers.iter().any(|(_, answer)| answer.is_ok()) {
        return Ok(split(answers));
    }
    worst(&answers).map_or_else(|| Ok((Vec::new(), Vec::new())), Err)
}

/// Of answers that are all none, the error that counts: the first of a node that may know what was asked for.
pub(crate) fn worst<T>(answers: &[(String, Result<T, AskError>)]) -> Option<AskError> {
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

/// One history of all nodes, with a remark for each that did not answer.
pub fn history(
    answers: Vec<(String, Result<history::Answer, AskError>)>,
) -> Result<history::Answer, AskError> {
    let (answered, silent) = answered(answers)?;
    let mut all = histories(answered);
    all.remarks.extend(silent);
    Ok(all)
}

/// The explanations of all nodes. The first has a remark for each node that did not answer.
pub fn explanations(
    answers: Vec<(String, Result<Explanation, AskError>)>,
) -> Result<Explanations, AskError> {
    let (mut answered, silent) = answered(answers)?;
    if let Some((_, first)) = answered.first_mut() {
        first.remarks.extend(silent);
    }
    Ok(Explanations::of(answered))
}

/// All series together, and remarks with their nodes where there are several.
fn histories(answers: Vec<(String, history::Answer)>) -> history::Answer {
    let several = answers.len() > 1;
    let named = |(node, mut one): (String, history::Answer)| {
        if several {
            let of_node = |remark: &mut String| remark.insert_str(0, &format!("node {node}: "));
            one.remarks.iter_mut().for_each(of_node);
        }
        history::Answer { node, ..one }
    };
    history::Answer::joined(answers.into_iter().map(named))
}

/// Answers, and a sentence for each node without one.
pub(crate) fn split<T>(answers: Vec<(String, Result<T, AskError>)>) -> Answered<T> {
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
pub fn waste(
    answers: Vec<(String, Result<Waste, AskError>)>,
    since: i64,
    now_unix_ms: i64,
) -> Waste {
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
        // By our clock.
        if one.since_unix_ms != 0 {
            begins.push(one.since_unix_ms.saturating_sub(ahead(one.at_unix_ms, now_unix_ms)));
        }
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
        [(_, currency), rest @ ..] => {
            if rest.iter().all(|(_, other)| other == currency) {
                all.currency.clone_from(currency);
                remarks.push(
                    "nodes have different prices (advice.price_per_gpu_hour): costs are sums of each \
                     node's own"
                        .to_owned(),
                );
            } else {
                remarks.push(
                    "nodes have prices in different currencies: costs are not to be added"
                        .to_owned(),
                );
            }
        }
    }
    all.namespaces = namespaces.into_values().collect();
    tessera_advice::largest_first(&mut all);
    all.remarks = remarks;
    all
}

#[cfg(test)]
mod tests {
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
    fn prices_that_differ_are_remarked_and_currencies_that_do_leave_no_sum() {
        let of = |price_per_gpu_hour, currency: &str| {
            let currency = currency.into();
            let namespaces = vec![NamespaceWaste::default()];
            Ok(Waste { price_per_gpu_hour, currency, namespaces, ..Waste::default() })
        };
        let all = |a, b| waste(vec![("a".to_owned(), a), ("b".to_owned(), b)], 0, 1);
        let prices = all(of(2.0, "EUR"), of(3.0, "EUR"));
        assert_eq!((prices.price_per_gpu_hour, prices.currency.as_str()), (0.0, "EUR"));
        assert!(prices.remarks[0].contains("different prices"), "{:?}", prices.remarks);
        let currencies = all(of(2.0, "EUR"), of(2.0, "USD"));
        assert_eq!(currencies.currency, "");
        assert!(currencies.remarks[0].contains("different currencies"), "{:?}", currencies.remarks);
    }

    #[test]
    fn the_window_begins_with_the_first_node_that_has_figures_by_our_clock() {
        const NOW: i64 = 1_800_000_000_000;
        const HOUR: i64 = 3_600_000;
        let of = |since_unix_ms, at_unix_ms, namespaces: usize| {
            let namespaces = vec![NamespaceWaste::default(); namespaces];
            let one = Waste { since_unix_ms, at_unix_ms, namespaces, ..Waste::default() };
            Ok(Waste { currency: if at_unix_ms == NOW { "EUR".into() } else { "".into() }, ..one })
        };
        let honest = || ("a".to_owned(), of(NOW - HOUR, NOW, 1));
        let empty = waste(vec![honest(), ("b".to_owned(), of(1, 0, 0))], NOW - 2 * HOUR, NOW);
        assert_eq!((empty.since_unix_ms, empty.currency.as_str()), (NOW - HOUR, "EUR"));
        assert_eq!(empty.remarks, [""; 0]);
        // A clock that is hours behind.
        let behind = ("b".to_owned(), of(NOW - 27 * HOUR, NOW - 25 * HOUR, 1));
        assert_eq!(waste(vec![behind], NOW - 4 * HOUR, NOW).since_unix_ms, NOW - 2 * HOUR);
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
}
