//! `REMORA.LOAD`: takes the memory to which the next snapshot will refer.

use std::ffi::CStr;
use std::time::Duration;

use remora_fabric::{Memory, View, handover};
use remora_redis::rdb::reference::TICKET_BYTES;
use remora_table::{LoadPage, server_pages::load_page::LOAD_PAGE_BYTES};

use super::strings::Strings;
use super::{Armed, Expired};
use crate::api::{Command, Context, LogLevel, OwnContext, OwnedStr, StrRef};
use crate::fast;

/// `REMORA.LOAD address secret ticket length [FLUSH]`
///
/// Address and secret of the handover, the ticket in the first field (hexadecimal), length of the memory in bytes.
/// `FLUSH`: empty the server, whose data are about to be replaced in any case. The reply has names and values:
/// `idle_times` is `yes` if the module can set the idle times of keys, and `no` if keys with idle times must come over
/// the link; `fast_keys` is `yes` if the module takes runs of small values, or `no` and why.
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
                let fast_keys = fast_keys.map_or_else(|why| format!("no: {why}"), |()| "yes".to_owned());
                let answers = [("idle_times", idle_times), ("fast_keys", fast_keys.as_str())];
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

/// Returns whether the module takes runs, or why not.
fn arm(context: &Context<'_>, arguments: &[StrRef<'_>]) -> Result<Result<(), String>, LoadError> {
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
    let fast_keys = fast.as_ref().map(drop).map_err(String::clone);
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
