//! Simulated: the parts of a replica agent that speak with its server, for a simulation: the preflight, and the
//! server's task with everything behind it. Product builds do not contain this module.

use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use remora_protocol::Offer;
use remora_redis::psync::server::Access;
use tokio::sync::{Notify, oneshot};

pub use super::Asks;
use super::server::{Hands, Keeper, ServerTask, Watched, Work};
use crate::control::Control;
use crate::exact::Judgement;
use crate::machine::{DeliveryEvent, Job, Reading, Report, Rules};
use crate::options::Options;
use crate::preflight::{self, Known};
use crate::record::Record;
use remora_delivery::Notice;
use remora_delivery::link::candidates::{LinkFailure, LinkPort};
use remora_delivery::payload::Introduction;
use remora_delivery::simulated::Stepped;
use remora_process::exit::{Code, Failure};
use remora_reader::data_set::DataSet;
use remora_reader::parts::Meter;
use remora_server::{PinSizes, Task};

/// The sizes of a simulated world, whose servers write a thousandth of the bytes.
pub const PIN_SIZES: PinSizes = PinSizes { prefill: 256, firm: 128, least_backlog: 512, slack: 8192 };

/// What the preflight gives.
pub struct Prepared {
    /// The server's task.
    pub server: ServerHandle,
    /// What the machine must know.
    pub rules: Rules,
    /// What the source and the primary were found to be about.
    pub data_set: DataSet,
    /// Kind and version of the server.
    pub kind: String,
    /// The password that the link asks for.
    pub secret: String,
    /// The primary's host and port.
    pub primary: (String, u16),
    /// Who is asked whether the primary covers the server.
    pub asks: Asks,
}

/// The server's task.
pub struct ServerHandle {
    task: ServerTask,
    /// Jobs that were not reported on.
    jobs: u64,
    meter: Arc<Meter>,
}

impl ServerHandle {
    /// How much of payloads the delivery has given to the server.
    pub fn gave(&self, bytes: u64, the_end: bool) {
        self.meter.bytes_given.set(bytes);
        self.meter.end_given.set(the_end.into());
    }

    /// Gives the task a job.
    pub fn give(&mut self, job: Job) {
        self.jobs += 1;
        self.task.give(match job {
            Job::Introduce { number } => Work::Introduce(Introduction::simulated(number)),
            job => Work::Job(job),
        });
    }

    /// Whether a job is not reported on.
    pub fn is_at_work(&self) -> bool {
        self.jobs > 0
    }

    /// Cancels an introduction.
    pub fn cancel(&self) {
        self.task.cancel();
    }

    /// The next report, and whether the module took what it was introduced to.
    pub fn poll_report(&mut self, cx: &mut Context<'_>) -> Poll<(Report, bool)> {
        let done = pin!(self.task.done());
        done.poll(cx).map(|done| {
            self.jobs = self.jobs.saturating_sub(1);
            (done.report, done.answer.is_some_and(|(_, answer)| answer.is_ok()))
        })
    }
}

/// Does what an agent does before it changes anything. `plan` is the source's answer to the question for a plan.
///
/// # Errors
/// Why the server is not suitable.
pub async fn prepare(
    options: Options,
    folder: &Path,
    link: SocketAddr,
    source: SocketAddr,
    plan: oneshot::Receiver<Offer>,
) -> Result<Prepared, Failure> {
    let server = options.server.open(Task::Replica)?;
    let mut client = server.connect().await?;
    let mut record = Record::open(Some(folder), &server.url().to_string())?;
    record.put_back_but_the_login(&mut client).await?;
    let target = preflight::target(&server, &mut client, &record, false).await?;
    if !target.unfinished {
        record.put_back(&mut client).await?;
    }
    let Ok(plan) = plan.await else { return Err(Failure::local("the source was lost")) };
    let primaries = preflight::known(&options, target.followed(&record), source);
    let known = Known { primaries, finding: None, source };
    let primary = preflight::primary(&options, &server, &target, &plan, &known).await.map_err(|unfit| unfit.failure)?;
    preflight::refuse_to_overwrite(&options, &server, &target)?;
    let rules = Rules {
        retry_for: options.read.retry_for,
        linger: options.linger,
        stay: options.stay,
        intercepted: false,
        replace: options.replace,
        server: server.url().to_string(),
        source: options.read.source.to_string(),
        primary: format!("{}:{}", primary.host, primary.port),
        run_id: target.facts.run_id.clone(),
        sizes: PIN_SIZES,
    };
    let (kind, access) = (target.facts.name(), target.link_login.access());
    let secret = match access {
        Access::Secret(secret) => secret,
        Access::User { password, .. } => String::from_utf8_lossy(&password).into_owned(),
        Access::Open => String::new(),
    };
    let data_set = primary.data_set(&plan);
    let asks = Asks::new(primary.is_asked, primary.facts.is_some(), &data_set);
    let address = (primary.host.clone(), primary.port);
    let control = Control::new(server, client);
    let meter = Arc::new(Meter::default());
    let hurry = Arc::new(Notify::new());
    let watched = Watched {
        meter: meter.clone(),
        judgement: Judgement::default(),
        link_failure: LinkFailure::default(),
        hurry: hurry.clone(),
    };
    let keeper = Keeper::new(options.into(), control, record, target, primary, LinkPort::opened(link), watched);
    let server = ServerHandle { task: ServerTask::start(Hands::Commands(Box::new(keeper)), hurry), jobs: 0, meter };
    Ok(Prepared { server, rules, data_set, kind, secret, primary: address, asks })
}

/// The event that a notice stands for, as in the driver.
/// What the machine is told of a notice of the delivery, if anything.
pub fn event(notice: Notice) -> Option<DeliveryEvent> {
    let fatal = |text: String| DeliveryEvent::Fatal { failure: Failure::local(text) };
    Some(match notice {
        Notice::Fatal { text } => fatal(text),
        Notice::Refused { failure } => DeliveryEvent::Fatal { failure },
        Notice::Damaged { error } => {
            DeliveryEvent::Fatal { failure: Failure::new(Code::SyncFailed, error.to_string()) }
        }
        Notice::Asked => DeliveryEvent::Asked,
        Notice::Introduce(introduction) => DeliveryEvent::Introduce { number: introduction.number },
        Notice::Fetched => DeliveryEvent::Fetched,
        Notice::PayloadSent => DeliveryEvent::PayloadSent,
        Notice::Loaded => DeliveryEvent::Loaded,
        Notice::LinkLost { text, loading } => DeliveryEvent::LinkLost { text, loading },
        Notice::FeedLost { error } => {
            DeliveryEvent::FeedLost { failure: Failure::new(Code::Source, error.to_string()) }
        }
        Notice::PeerLost(_) => return None,
        Notice::FeedWanted => DeliveryEvent::FeedWanted,
    })
}

/// What the machine is told of the delivery.
pub fn reading(delivery: &Stepped) -> Reading {
    let meter = delivery.meter();
    Reading {
        loaded: delivery.position().loaded,
        bytes_delivered: meter.bytes_given.get(),
        slots_held: meter.slots_held.get(),
        stream_fetched: meter.stream_fetched.get(),
        stream_paused: meter.stream_paused.get() > 0,
        stream_delivered: meter.stream_delivered.get(),
        readers: 0,
    }
}
