//! `[advice]`: what recommendations and waste are judged by; `docs/views.md` has the rules.

use std::time::Duration;

use serde_json::json;

use crate::form::{money, parsed, time, whole};
use crate::table::table;

const HOUR: u64 = 3600;

const fn hours(hours: u64) -> Duration {
    Duration::from_secs(hours * HOUR)
}

table! {
    /// What `tessera recommend` and `tessera waste` judge by.
    pub struct Advice {
        /// Part of the observed time that the advised memory covers, percent. No less than the highest use is
        /// advised.
        memory_percentile: u32 = 99, whole(50..=100);
        /// What is added to that, percent.
        memory_margin: u32 = 15, whole(0..=400);
        /// Part of the observed time that the advised share covers, percent, of GPU time used and waited for.
        cores_percentile: u32 = 95, whole(50..=100);
        /// What is added to that, percent.
        cores_margin: u32 = 15, whole(0..=400);
        /// How long a tenant must have had no work on a GPU to count as idle.
        idle_after: Duration = hours(4), time(Duration::from_secs(60), hours(31 * 24));
        /// How far back advice looks where the question does not say.
        window: Duration = hours(7 * 24), time(hours(1), hours(366 * 24));
        /// What a whole GPU costs for an hour. 0: no costs are shown.
        price_millis_per_gpu_hour as "price_per_gpu_hour": u64 = 0, money();
        /// The price's currency, as it is printed.
        currency: String = "USD".into(), parsed(
            currency, String::clone, "1 to 8 letters",
            || json!({ "pattern": r"^[A-Za-z]{1,8}$" }),
        );
    }
}

fn currency(text: &str) -> Result<String, String> {
    let fits = (1..=8).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphabetic());
    fits.then(|| text.to_owned())
        .ok_or_else(|| format!("\"{text}\" is no currency; write 1 to 8 letters, such as \"EUR\""))
}

impl Advice {
    /// The price of a whole GPU for an hour, in [`Advice::currency`].
    pub fn price_per_gpu_hour(&self) -> f64 {
        // A price beyond 2^53 thousandths is nobody's.
        self.price_millis_per_gpu_hour as f64 / 1000.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    #[test]
    fn a_price_is_a_number() {
        for (text, millis) in [("2", 2000), ("2.5", 2500), ("\"0.125\"", 125), ("0", 0)] {
            let config = Config::parse(&format!("[advice]\nprice_per_gpu_hour = {text}")).unwrap();
            assert_eq!(config.advice.price_millis_per_gpu_hour, millis, "{text}");
        }
        assert!((Advice::default().price_per_gpu_hour()).abs() < f64::EPSILON);
    }
}
