//! Families: names and values as text, in the two forms that are read: OpenMetrics, and Prometheus's own.

use std::borrow::Cow;
use std::fs;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::{prometheus_text, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family as Many;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry};
use rustix::process::{Resource, getrlimit};

use super::register::{
    Agent, BUILD, Family, Kind, PREFIX, PROCESS_CPU, PROCESS_FDS, PROCESS_MAX_FDS, PROCESS_MEMORY, PROCESS_START,
};

/// Names and values of a metric's labels.
type Labels = Vec<(&'static str, String)>;

/// The form of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The standard, which Prometheus asks for.
    OpenMetrics,
    /// Prometheus's text format 0.0.4, which `promtool` and node_exporter read.
    Classic,
}

/// The metrics of one scrape, or of one file.
#[derive(Debug)]
pub struct Families {
    agent: Agent,
    /// The names of this project.
    ours: Registry,
    /// Those that every program's process has.
    process: Registry,
    /// All of them, in the order in which they were added, for the page.
    values: Vec<Value>,
}

/// One value, as it was added.
#[derive(Clone, Debug)]
pub struct Value {
    /// Its family.
    pub family: &'static Family,
    /// The values of the family's labels.
    pub labels: Vec<String>,
    /// The value itself.
    pub value: f64,
}

impl Families {
    /// Begins with what each agent has: its version.
    pub fn new(agent: Agent) -> Families {
        Families { agent, ours: Registry::with_prefix(PREFIX), process: Registry::default(), values: Vec::new() }
            .with_version()
    }

    /// Begins a file. `run` tells the values of several files of one folder apart. What this process is at present says
    /// nothing there.
    pub fn of_file(agent: Agent, run: &str) -> Families {
        let label = (Cow::from("run"), Cow::from(run.to_owned()));
        let ours = Registry::with_prefix_and_labels(PREFIX, [label].into_iter());
        Families { agent, ours, process: Registry::default(), values: Vec::new() }.with_version()
    }

    fn with_version(mut self) -> Families {
        self.info(&BUILD, [env!("CARGO_PKG_VERSION"), self.agent.name()]);
        self
    }

    /// The command that they are of.
    pub fn agent(&self) -> Agent {
        self.agent
    }

    /// All values.
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    fn note(&mut self, family: &'static Family, labels: &Labels, value: f64) {
        let labels = labels.iter().map(|(_, value)| value.clone()).collect();
        self.values.push(Value { family, labels, value });
    }

    fn register(&mut self, family: &'static Family, metric: impl Metric) {
        debug_assert!(family.agents.contains(&self.agent), "{} is not of {}", family.name, self.agent.name());
        let registry = if family.is_of_a_process() { &mut self.process } else { &mut self.ours };
        registry.register(family.name, family.help, metric);
    }

    /// Adds an info with these values of its labels.
    pub fn info<V: Into<String>, const N: usize>(&mut self, family: &'static Family, values: [V; N]) {
        debug_assert_eq!(family.kind, Kind::Info, "{}", family.name);
        let labels = labels(family, values);
        self.note(family, &labels, 1.0);
        self.register(family, Info::new(labels));
    }

    /// One set of labels for each of several things.
    pub fn infos<V: Into<String>, const N: usize>(
        &mut self,
        family: &'static Family,
        of: impl IntoIterator<Item = [V; N]>,
    ) {
        self.gauges(family, of.into_iter().map(|values| (values, 1.0)));
    }

    /// Adds a value that rises and falls.
    pub fn gauge(&mut self, family: &'static Family, value: f64) {
        debug_assert_eq!(family.kind, Kind::Gauge, "{}", family.name);
        let gauge = Gauge::<f64, AtomicU64>::default();
        gauge.set(value);
        self.note(family, &Labels::new(), value);
        self.register(family, gauge);
    }

    /// A gauge whose value is a whole number.
    pub fn number(&mut self, family: &'static Family, value: u64) {
        self.gauge(family, value as f64);
    }

    /// 1 or 0.
    pub fn whether(&mut self, family: &'static Family, is_so: bool) {
        self.gauge(family, f64::from(u8::from(is_so)));
    }

    /// One gauge for each set of labels.
    pub fn gauges<V: Into<String>, const N: usize>(
        &mut self,
        family: &'static Family,
        values: impl IntoIterator<Item = ([V; N], f64)>,
    ) {
        debug_assert_eq!(family.kind, Kind::Gauge, "{}", family.name);
        let many = Many::<Labels, Gauge<f64, AtomicU64>>::default();
        for (of, value) in values {
            let labels = labels(family, of);
            self.note(family, &labels, value);
            many.get_or_create(&labels).set(value);
        }
        self.register(family, many);
    }

    /// 1 for the one of these names that is meant, and 0 for each other one.
    pub fn states<const N: usize>(&mut self, family: &'static Family, names: [&str; N], is: Option<&str>) {
        self.gauges(family, names.map(|name| ([name], f64::from(u8::from(is == Some(name))))));
    }

    /// Adds a count that only rises.
    pub fn counter(&mut self, family: &'static Family, value: u64) {
        debug_assert_eq!(family.kind, Kind::Counter, "{}", family.name);
        let counter = Counter::<u64, AtomicU64>::default();
        counter.inc_by(value);
        self.note(family, &Labels::new(), value as f64);
        self.register(family, counter);
    }

    /// A counter of seconds.
    pub fn seconds(&mut self, family: &'static Family, value: f64) {
        debug_assert_eq!(family.kind, Kind::Counter, "{}", family.name);
        let counter = Counter::<f64, AtomicU64>::default();
        counter.inc_by(value);
        self.note(family, &Labels::new(), value);
        self.register(family, counter);
    }

    /// One counter for each set of labels.
    pub fn counters<V: Into<String>, const N: usize>(
        &mut self,
        family: &'static Family,
        values: impl IntoIterator<Item = ([V; N], u64)>,
    ) {
        debug_assert_eq!(family.kind, Kind::Counter, "{}", family.name);
        let many = Many::<Labels, Counter<u64, AtomicU64>>::default();
        for (of, value) in values {
            let labels = labels(family, of);
            self.note(family, &labels, value as f64);
            many.get_or_create(&labels).inc_by(value);
        }
        self.register(family, many);
    }

    /// All of it, in this form.
    pub fn text(&self, form: Form) -> String {
        let mut all = String::new();
        // A string takes everything.
        _ = match form {
            Form::OpenMetrics => {
                text::encode_registry(&mut all, &self.process).and_then(|()| text::encode(&mut all, &self.ours))
            }
            Form::Classic => prometheus_text::encode(&mut all, &self.process)
                .and_then(|()| prometheus_text::encode(&mut all, &self.ours)),
        };
        all
    }
}

fn labels<V: Into<String>, const N: usize>(family: &Family, values: [V; N]) -> Labels {
    debug_assert_eq!(family.labels.len(), N, "{}", family.name);
    family.labels.iter().copied().zip(values.map(Into::into)).collect()
}

// Process: what the system says of this process, under the names that every program has for it.

/// What of `/proc/self/stat` is used.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    /// Ticks of user and system.
    cpu: u64,
    /// Ticks from the boot to its start.
    started: u64,
    /// Pages in RAM.
    resident: u64,
}

impl Stat {
    fn parse(text: &str) -> Option<Stat> {
        // The second field is the program's name in brackets, which may contain spaces and brackets.
        let (_, rest) = text.rsplit_once(')')?;
        let fields: Vec<u64> = rest.split_whitespace().skip(1).map(|field| field.parse().unwrap_or(0)).collect();
        // Counted from the fourth, as proc(5) counts: 14 and 15, 22, 24.
        let field = |number: usize| fields.get(number - 4).copied();
        Some(Stat { cpu: field(14)? + field(15)?, started: field(22)?, resident: field(24)? })
    }
}

/// Ticks of the processors that this process has used.
pub fn own_ticks() -> Option<u64> {
    Stat::parse(&fs::read_to_string("/proc/self/stat").ok()?).map(|stat| stat.cpu)
}

/// Adds what is known. What the system does not say is left out.
pub(super) fn show(families: &mut Families) {
    let ticks = rustix::param::clock_ticks_per_second().max(1);
    let page = rustix::param::page_size() as u64;
    if let Some(stat) = fs::read_to_string("/proc/self/stat").ok().as_deref().and_then(Stat::parse) {
        families.seconds(&PROCESS_CPU, stat.cpu as f64 / ticks as f64);
        families.number(&PROCESS_MEMORY, stat.resident.saturating_mul(page));
        if let Some(booted) = booted() {
            families.gauge(&PROCESS_START, booted.as_secs_f64() + stat.started as f64 / ticks as f64);
        }
    }
    if let Ok(open) = fs::read_dir("/proc/self/fd") {
        // One of them is that of this look.
        families.number(&PROCESS_FDS, (open.count() as u64).saturating_sub(1));
    }
    if let Some(most) = getrlimit(Resource::Nofile).current {
        families.number(&PROCESS_MAX_FDS, most);
    }
}

/// When the system was booted, since 1970.
fn booted() -> Option<Duration> {
    let text = fs::read_to_string("/proc/stat").ok()?;
    let seconds = text.lines().find_map(|line| line.strip_prefix("btime "))?;
    Some(Duration::from_secs(seconds.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::super::register::{PROCESS_CPU, REPLICA_LAG, SNAPSHOT_BYTES, SNAPSHOTS};
    use super::*;

    fn families(mut families: Families) -> Families {
        families.number(&SNAPSHOT_BYTES, 12);
        families.counters(&SNAPSHOTS, [(["taken"], 3)]);
        families.gauges(&REPLICA_LAG, [(["a\"b\n"], 0.5)]);
        families
    }

    #[test]
    fn both_forms_have_their_names_and_escapes() {
        let mut families = families(Families::new(Agent::Source));
        families.seconds(&PROCESS_CPU, 1.5);
        let version = env!("CARGO_PKG_VERSION");
        let text = families.text(Form::OpenMetrics);
        for line in [
            "remora_snapshot_bytes 12.0\n",
            "remora_snapshots_total{result=\"taken\"} 3\n",
            "remora_replica_lag_bytes{replica=\"a\\\"b\\n\"} 0.5\n",
            "# TYPE remora_build info\n",
            &format!("remora_build_info{{version=\"{version}\",agent=\"source\"}} 1\n"),
            "# TYPE process_cpu_seconds counter\n",
            "process_cpu_seconds_total 1.5\n",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        assert!(text.ends_with("# EOF\n") && text.matches("# EOF").count() == 1);
        let text = families.text(Form::Classic);
        for line in [
            "# TYPE remora_snapshots_total counter\n",
            "remora_snapshots_total{result=\"taken\"} 3\n",
            "# TYPE remora_build_info gauge\n",
            "remora_replica_lag_bytes{replica=\"a\\\"b\\n\"} 0.5\n",
            "# TYPE process_cpu_seconds_total counter\n",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        assert!(!text.contains("# EOF"));
    }

    #[test]
    fn a_file_names_its_run_and_no_process() {
        let families = families(Families::of_file(Agent::Source, "nightly"));
        let text = families.text(Form::Classic);
        for line in
            ["remora_snapshot_bytes{run=\"nightly\"} 12", "remora_snapshots_total{run=\"nightly\",result=\"taken\"} 3"]
        {
            assert!(text.contains(line), "{line}: {text}");
        }
        assert!(!text.contains("process_"), "{text}");
    }

    #[test]
    fn a_name_with_brackets_moves_no_field() {
        let line = "7 (a ) b) S 1 2 3 4 -1 6 7 8 9 10 100 23 12 13 20 0 5 0 4242 99 512 18446744073709551615 1\n";
        assert_eq!(Stat::parse(line), Some(Stat { cpu: 123, started: 4242, resident: 512 }));
        assert_eq!(Stat::parse("7 (a) S 1"), None);
    }
}
