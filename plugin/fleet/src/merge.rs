//! Answers of several nodes as one. Pure.

use std::collections::BTreeMap;

use tessera_view::advice::{NamespaceWaste, Waste};
use tessera_view::{API_VERSION, history};

use crate::answer::AskError;

/// Moves every instant of an answer.
pub(crate) fn shift(answer: &mut history::Answer, by_ms: i64) {
    if by_ms == 0 {
        return;
    }
    let moved = |at: &mut i64| {
        if *at != 0 {
            *at = at.saturating_add(by_ms);
        }
    };
    moved(&mut answer.at_unix_ms);
    moved(&mut answer.since_unix_ms);
    answer
        .gpus
        .iter_mut()
        .flat_map(|gpu| &mut gpu.points)
        .for_each(|point| moved(&mut point.at_unix_ms));
    let points = answer.tenants.iter_mut().flat_map(|tenant| &mut tenant.points);
    points.for_each(|point| moved(&mut point.at_unix_ms));
    answer.events.iter_mut().for_each(|event| moved(&mut event.at_unix_ms));
}

/// All series together. What belongs to one node alone is not said of several.
#[must_use]
pub fn histories(answers: Vec<(String, history::Answer)>) -> history::Answer {
    let several = answers.len() > 1;
    let mut all =
        history::Answer { api_version: API_VERSION.to_owned(), ..history::Answer::default() };
    for (node, one) in answers {
        all.node = if several { String::new() } else { node.clone() };
        all.at_unix_ms = all.at_unix_ms.max(one.at_unix_ms);
        all.step_seconds = all.step_seconds.max(one.step_seconds);
        all.since_unix_ms = match (all.since_unix_ms, one.since_unix_ms) {
            (0, since) | (since, 0) => since,
            (a, b) => a.min(b),
        };
        all.gpus.extend(one.gpus);
        all.tenants.extend(one.tenants);
        all.events.extend(one.events);
        let said = one.remarks.into_iter();
        all.remarks.extend(
            said.map(|remark| if several { format!("node {node}: {remark}") } else { remark }),
        );
    }
    all.events.sort_by_key(|event| event.at_unix_ms);
    all
}

pub(crate) fn split<T>(
    answers: Vec<(String, Result<T, AskError>)>,
) -> (Vec<(String, T)>, Vec<String>) {
    let (mut answered, mut remarks) = (Vec::new(), Vec::new());
    for (node, answer) in answers {
        match answer {
            Ok(answer) => answered.push((node, answer)),
            // It has no such pod: others may.
            Err(AskError::Unknown(_)) => {}
            Err(error) => remarks.push(format!("node {node} is left out: {error}")),
        }
    }
    (answered, remarks)
}

/// The waste of all nodes by namespace, the largest first.
#[must_use]
pub fn waste(answers: Vec<(String, Result<Waste, AskError>)>, now_unix_ms: i64) -> Waste {
    let (answered, mut remarks) = split(answers);
    let mut all =
        Waste { api_version: API_VERSION.to_owned(), at_unix_ms: now_unix_ms, ..Waste::default() };
    let mut namespaces: BTreeMap<String, NamespaceWaste> = BTreeMap::new();
    let mut prices: Vec<(f64, String)> = Vec::new();
    for (node, one) in answered {
        remarks.extend(one.remarks.into_iter().map(|remark| format!("node {node}: {remark}")));
        all.since_unix_ms = match (all.since_unix_ms, one.since_unix_ms) {
            (0, since) | (since, 0) => since,
            (a, b) => a.min(b),
        };
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
        let all = waste(answers, 1);
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
            Ok(Waste { price_per_gpu_hour, currency: currency.into(), ..Waste::default() })
        };
        let all = |a, b| waste(vec![("a".to_owned(), a), ("b".to_owned(), b)], 1);
        let prices = all(of(2.0, "EUR"), of(3.0, "EUR"));
        assert_eq!((prices.price_per_gpu_hour, prices.currency.as_str()), (0.0, "EUR"));
        assert!(prices.remarks[0].contains("different prices"), "{:?}", prices.remarks);
        let currencies = all(of(2.0, "EUR"), of(2.0, "USD"));
        assert_eq!(currencies.currency, "");
        assert!(currencies.remarks[0].contains("different currencies"), "{:?}", currencies.remarks);
    }

    #[test]
    fn instants_move_together_and_absent_ones_stay() {
        let mut answer =
            history::Answer { at_unix_ms: 100, since_unix_ms: 0, ..Default::default() };
        answer.events.push(history::Event { at_unix_ms: i64::MAX, ..Default::default() });
        shift(&mut answer, 50);
        assert_eq!((answer.at_unix_ms, answer.since_unix_ms), (150, 0));
        assert_eq!(answer.events[0].at_unix_ms, i64::MAX);
    }
}
