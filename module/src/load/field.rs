//! The callback of the server's loader for one of our fields in a snapshot.

use std::ffi::CStr;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use remora_fabric::{Memory, View, handover};
use remora_redis::rdb::reference::{TICKET_BYTES, Word, WordError, words};
use remora_table::LoadPage;
use remora_table::server_pages::load_page::LOAD_PAGE_BYTES;

use super::strings::{StringError, Strings};
use super::{Armed, Busy, COUNTS, Expired};
use crate::api::{AuxLoad, Command, Context, Io, LogLevel, OwnContext, OwnedStr, StrRef};
use crate::fast;

/// The module type that exists for these fields.
pub(super) struct References;

impl AuxLoad for References {
    const TYPE_NAME: &'static CStr = c"RemoraRef";
    const ENCODING: u16 = remora_redis::rdb::reference::VERSION;

    fn load(io: &Io<'_>, _encoding: u16) -> bool {
        // Taken out of the cell while it is used: the server may call us again when we yield.
        let Some(mut armed) = Armed::take() else {
            warn(io, "the snapshot contains memory references, but no memory was handed over (REMORA.LOAD)");
            return false;
        };
        let busy = Busy::begin();
        let result = armed.execute(io);
        match &result {
            Ok(()) => {
                armed.page.count();
                armed.context.yield_now(true, c"loading a snapshot out of shared memory");
            }
            Err(error) => {
                let text = error.to_string();
                armed.page.refuse(&text);
                warn(io, &text);
            }
        }
        armed.put();
        drop(busy);
        result.is_ok()
    }
}

const _: () = assert!(
    const_equal(References::TYPE_NAME.to_bytes(), remora_redis::rdb::reference::TYPE_NAME.as_bytes()),
    "the type's name is the one that agents write"
);

const fn const_equal(one: &[u8], other: &[u8]) -> bool {
    let mut at = 0;
    while at < one.len() && at < other.len() && one[at] == other[at] {
        at += 1;
    }
    at == one.len() && at == other.len()
}

/// Why a load fails.
#[derive(Debug, thiserror::Error)]
enum FieldError {
    #[error("the snapshot breaks off inside a field of references")]
    CutOff,
    #[error(transparent)]
    Word(#[from] WordError),
    #[error("the snapshot refers to other memory than was handed over: an agent that was replaced sent it")]
    Ticket,
    #[error("the field of references lacks its first word")]
    NoHello,
    #[error(
        "the server loads into a data set that it does not serve yet (repl-diskless-load is {0}), where a module \
         can't create keys"
    )]
    Aside(String),
    #[error(transparent)]
    String(#[from] StringError),
}

impl Armed {
    fn execute(&mut self, io: &Io<'_>) -> Result<(), FieldError> {
        let bytes = io.bytes().ok_or(FieldError::CutOff)?;
        for word in words(&bytes) {
            match word? {
                Word::Hello { ticket } => self.begin(&ticket)?,
                _ if !self.begun => return Err(FieldError::NoHello),
                word => self.strings.execute(&self.context, &word)?,
            }
        }
        let (keys, bytes) = self.strings.take_counts();
        COUNTS.keys.fetch_add(keys, Relaxed);
        COUNTS.bytes.fetch_add(bytes, Relaxed);
        Ok(())
    }

    fn begin(&mut self, ticket: &[u8]) -> Result<(), FieldError> {
        if ticket != self.ticket {
            return Err(FieldError::Ticket);
        }
        // Checked again: the setting may have changed since the memory was handed over. It can't change while the
        // server is loading.
        let way = self.context.setting("repl-diskless-load").unwrap_or_default();
        if way == "swapdb" {
            return Err(FieldError::Aside(way));
        }
        self.begun = true;
        Ok(())
    }
}

fn warn(io: &Io<'_>, text: &str) {
    if let Some(context) = io.context() {
        context.log(LogLevel::Warning, text);
    }
}

// `REMORA.LOAD`: takes the memory to which the next snapshot will refer.

/// `REMORA.LOAD address secret ticket length [FLUSH]`
///
/// Address and secret of the handover, the ticket in the first field (hexadecimal), length of the memory in bytes.
/// `FLUSH`: empty the server, whose data are about to be replaced in any case. The reply has names and values:
/// `idle_times` is `yes` if the module can set the idle times of keys, and `no` if keys with idle times must come over
/// the link; `fast_keys` is `yes` if the module takes runs of small values, or `no` and why; `verify` is `yes` if it
/// wants to look at what was loaded ([`Word::Verify`]) before the snapshot ends.
pub(crate) struct Load;

impl Command for Load {
    const NAME: &'static CStr = c"remora.load";
    // A replica that waits for its snapshot is stale. Not allowed while something is being loaded: that would be the
    // wrong load.
    const FLAGS: &'static CStr = c"admin deny-script allow-stale no-monitor no-slowlog";

    fn run(context: &Context<'_>, arguments: &[StrRef<'_>]) {
        match arm(context, arguments) {
            Ok(fast_keys) => {
                let idle_times = if sets_idle_times(context) { "yes" } else { "no" };
                let verify = if fast_keys == Ok(true) { "yes" } else { "no" };
                let fast_keys = fast_keys.map_or_else(|why| format!("no: {why}"), |_| "yes".to_owned());
                let answers = [("idle_times", idle_times), ("fast_keys", fast_keys.as_str()), ("verify", verify)];
                context.reply_array(2 * answers.len());
                for (name, value) in answers {
                    context.reply_bytes(name.as_bytes());
                    context.reply_bytes(value.as_bytes());
                }
            }
            Err(error) => context.reply_error(&format!("ERR remora: {error}")),
        }
    }
}

/// Why `REMORA.LOAD` failed.
#[derive(Debug, thiserror::Error)]
enum LoadError {
    #[error("usage: REMORA.LOAD address secret ticket length [FLUSH]")]
    Arguments,
    #[error("the memory was not handed over: {0}; is the agent on this host, in the same network namespace?")]
    Handover(#[from] remora_fabric::memory::Error),
    #[error("{0}")]
    LoadPage(#[from] remora_table::Error),
    #[error("expected 2 descriptors, got {0}")]
    Count(usize),
    #[error(
        "repl-diskless-load is {0}: only on-empty-db and flush-before-load load from the link into the server's own \
         data"
    )]
    Setting(String),
    #[error(
        "there are {0} keys, and with repl-diskless-load on-empty-db only an empty server loads from its link: FLUSH \
         was not given"
    )]
    NotEmpty(u64),
    #[error("emptying the server failed: {0}")]
    Flush(String),
    #[error("not supported in cluster mode")]
    Cluster,
}

/// How long the agent may take to hand the memory over: it is waiting for us, on this host. The server does nothing
/// else meanwhile.
const TAKE_LIMIT: Duration = Duration::from_secs(1);

/// How long the load may take to begin: the agent sends at once, but the server may empty itself first, which may take
/// minutes.
const BEGIN_LIMIT_MILLIS: u64 = 10 * 60 * 1000;

/// Returns whether the module takes runs, and then whether that load must be verified; or why not.
fn arm(context: &Context<'_>, arguments: &[StrRef<'_>]) -> Result<Result<bool, String>, LoadError> {
    let wanted = Wanted::parse(arguments).ok_or(LoadError::Arguments)?;
    if context.flags().is_cluster() {
        return Err(LoadError::Cluster);
    }
    if let Some(former) = Armed::take() {
        context.stop_timer(former.timer);
        former.page.refuse("other memory was handed over");
    }
    let mut descriptors = handover::take(wanted.address, wanted.secret, TAKE_LIMIT)?.into_iter();
    let (Some(memory), Some(page), None) = (descriptors.next(), descriptors.next(), descriptors.next()) else {
        return Err(LoadError::Count(descriptors.len()));
    };
    let view = View::open(memory, wanted.length)?;
    let page = LoadPage::adopt(Memory::adopt(page, LOAD_PAGE_BYTES)?)?;
    let own = OwnContext::new(context);
    make_ready(&own, wanted.flush)?;
    let fast = fast::offer(&own);
    let fast_keys = fast.as_ref().map(|offer| offer.verify).map_err(String::clone);
    let how = fast.as_ref().map_or_else(|why| format!("without fast keys: {why}"), |_| "with fast keys".to_owned());
    let timer = context.set_timer::<Expired>(BEGIN_LIMIT_MILLIS, 0);
    let strings = Strings::new(view, fast.ok());
    Armed { ticket: wanted.ticket, strings, page, context: own, begun: false, timer }.put();
    context.log(LogLevel::Notice, &format!("remora: memory was handed over for the next load, {how}"));
    Ok(fast_keys)
}

/// The parsed arguments.
struct Wanted<'a> {
    address: &'a str,
    secret: &'a str,
    ticket: [u8; TICKET_BYTES],
    length: u64,
    flush: bool,
}

impl<'a> Wanted<'a> {
    fn parse(arguments: &[StrRef<'a>]) -> Option<Wanted<'a>> {
        let (required, rest) = arguments.split_first_chunk::<4>()?;
        let flush = match rest {
            [] => false,
            [word] => word.as_str().filter(|word| word.eq_ignore_ascii_case("flush")).map(|_| true)?,
            _ => return None,
        };
        let [address, secret, ticket, length] = required;
        let ticket = hexadecimal(ticket.as_str()?)?;
        Some(Wanted {
            address: address.as_str()?,
            secret: secret.as_str()?,
            ticket,
            length: length.as_str()?.parse().ok()?,
            flush,
        })
    }
}

/// Parses 32 hexadecimal digits as 16 bytes.
fn hexadecimal(text: &str) -> Option<[u8; TICKET_BYTES]> {
    let mut bytes = [0; TICKET_BYTES];
    if text.len() != 2 * TICKET_BYTES || !text.is_ascii() {
        return None;
    }
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(bytes)
}

/// Makes sure that the server will load from its link, into its own data.
fn make_ready(context: &Context<'_>, flush: bool) -> Result<(), LoadError> {
    match context.setting("repl-diskless-load").as_deref() {
        // The server would empty itself while its agent waits for the load: do it now.
        Some("flush-before-load") if flush => empty(context, true),
        Some("flush-before-load") => Ok(()),
        Some("on-empty-db") => empty(context, flush),
        other => Err(LoadError::Setting(other.unwrap_or("unknown").to_owned())),
    }
}

/// Whether the idle time of a key can be set. Valkey 9.1 takes the milliseconds of its API for thousands of seconds.
fn sets_idle_times(context: &Context<'_>) -> bool {
    let info = context.server_info(c"server");
    info.is_some_and(|info| info.get(c"server_name").is_none_or(|name| name != "valkey"))
}

/// Empties the databases one by one with FLUSHDB: FLUSHALL would also replace the server's last RDB file by an empty
/// one.
fn empty(context: &Context<'_>, allowed: bool) -> Result<(), LoadError> {
    let lazy = context.setting("replica-lazy-flush").as_deref() == Some("yes");
    let how = OwnedStr::new(context, if lazy { b"ASYNC" } else { b"SYNC" });
    for database in (0..).take_while(|database| context.select(*database)) {
        match context.key_count() {
            0 => {}
            keys if !allowed => return Err(LoadError::NotEmpty(keys)),
            _ => match context.call(c"FLUSHDB", &[how.borrow()]) {
                Some(reply) => reply.error().map_or(Ok(()), |error| Err(LoadError::Flush(error)))?,
                None => return Err(LoadError::Flush(format!("FLUSHDB of database {database} gave no reply"))),
            },
        }
    }
    Ok(())
}
