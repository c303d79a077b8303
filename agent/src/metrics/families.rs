//! Families: names and values as OpenMetrics text.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

/// The prefix of every name.
const PREFIX: &str = "remora";

/// Names and values of a metric's labels.
type Labels = Vec<(&'static str, String)>;

/// The metrics of one scrape.
pub(crate) struct Families {
    registry: Registry,
}

impl Families {
    /// Begins with what each agent has: its version.
    pub(crate) fn new() -> Families {
        let mut families = Families { registry: Registry::with_prefix(PREFIX) };
        let version = env!("CARGO_PKG_VERSION").to_owned();
        families.info("build", "The agent's version", vec![("version", version)]);
        families
    }

    pub(crate) fn info(&mut self, name: &str, help: &str, labels: Labels) {
        self.registry.register(name, help, Info::new(labels));
    }

    pub(crate) fn gauge(&mut self, name: &str, help: &str, value: f64) {
        let gauge = Gauge::<f64, AtomicU64>::default();
        gauge.set(value);
        self.registry.register(name, help, gauge);
    }

    pub(crate) fn counter(&mut self, name: &str, help: &str, value: u64) {
        let counter = Counter::<u64, AtomicU64>::default();
        counter.inc_by(value);
        self.registry.register(name, help, counter);
    }

    /// One gauge for each set of labels.
    pub(crate) fn gauges(&mut self, name: &str, help: &str, values: impl IntoIterator<Item = (Labels, f64)>) {
        let family = Family::<Labels, Gauge<f64, AtomicU64>>::default();
        for (labels, value) in values {
            family.get_or_create(&labels).set(value);
        }
        self.registry.register(name, help, family);
    }

    /// One counter for each set of labels.
    pub(crate) fn counters(&mut self, name: &str, help: &str, values: impl IntoIterator<Item = (Labels, u64)>) {
        let family = Family::<Labels, Counter<u64, AtomicU64>>::default();
        for (labels, value) in values {
            family.get_or_create(&labels).inc_by(value);
        }
        self.registry.register(name, help, family);
    }

    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // A string takes everything.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_open_metrics() {
        let mut families = Families::new();
        families.gauge("snapshot_bytes", "Bytes of the snapshot", 12.0);
        families.counters("snapshots", "Snapshots", [(vec![("result", "taken".to_owned())], 3)]);
        families.gauges("replica_lag_bytes", "Lag", [(vec![("replica", "a\"b\n".to_owned())], 0.5)]);
        let text = families.text();
        for line in [
            "remora_snapshot_bytes 12.0",
            "remora_snapshots_total{result=\"taken\"} 3",
            "remora_replica_lag_bytes{replica=\"a\\\"b\\n\"} 0.5",
            "# TYPE remora_build info",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }
}
