//! The work of a fork child before it writes its first byte, if its server was armed.
//!
//! The child was forked to save something, and does that afterwards. If something fails here before anything was
//! deleted from the child's memory, the page gets the reason, and the server saves everything as usual. If something
//! fails later, the child ends, so that the incomplete rest is not taken for a complete snapshot.

use std::cell::RefCell;
use std::ffi::CStr;
use std::thread;
use std::time::{Duration, Instant};

use remora_fabric::Memory;
use remora_table::CapturePage;
use remora_table::server_pages::{Stage, Work};

use super::walk;
use super::{Armed, CaptureError, SharedWith};
use crate::api::{
    Command, Context, EVENT_PERSISTENCE, EventHandler, LogLevel, OPTION_HANDLE_IO_ERRORS,
    OPTION_HANDLE_REPL_ASYNC_LOAD, OPTION_NO_IMPLICIT_SIGNAL_MODIFIED, OwnContext, OwnedStr, PERSISTENCE_RDB_START,
    StrRef,
};

/// Handles the beginning of a snapshot.
pub(crate) struct SnapshotBegins;

impl EventHandler for SnapshotBegins {
    const EVENT: u64 = EVENT_PERSISTENCE;

    /// Only a snapshot in a fork child concerns us; a save in the server's own process is left alone.
    fn handle(context: &Context<'_>, what: u64) {
        if what != PERSISTENCE_RDB_START || !context.flags().is_child() {
            return;
        }
        let Some(armed) = super::take_in_child() else { return };
        if armed.page.stage() != Stage::Armed || armed.page.is_cancelled() {
            return;
        }
        let own = OwnContext::new(context);
        if super::saves_to_disk() {
            // The file may be that of the sync for which the agent waits, if syncs go to files now. Otherwise it is no
            // concern of the agent: its child is still to come.
            if matches!(super::syncs_go_to_sockets(&own), Ok(false)) {
                armed.page.decline(&CaptureError::NotExclusive(SharedWith::File).to_string());
            }
            return;
        }
        WORK.set(Some(armed));
        let error = own
            .call(Walk::NAME, &[])
            .map_or(Some("the server gave no reply to REMORA.WALK".into()), |reply| reply.error());
        WORK.with_borrow(|work| {
            if let Some(armed) = work {
                conclude(&own, &armed.page, error);
            }
        });
    }
}

/// Concludes the work, however it ended: even after a panic, the server must not save an incomplete data set.
fn conclude(context: &Context<'_>, page: &CapturePage, error: Option<String>) {
    let why = || error.unwrap_or_else(|| "a bug of remora in the walk; the server's log has the location".into());
    match page.stage() {
        Stage::Done | Stage::Declined => return,
        Stage::Armed | Stage::Asking => return page.decline(&format!("the walk failed: {}", why())),
        Stage::Begun => page.fail(&why()),
        Stage::Failed => {}
    }
    context.log(LogLevel::Warning, &format!("remora: {}; this child ends, and with it the sync", page.status_text()));
    context.fail_child();
}

thread_local! {
    /// Passes the armed state from the event to the command that the event calls.
    static WORK: RefCell<Option<Armed>> = const { RefCell::new(None) };
}

/// `REMORA.WALK`: called by the module itself, in a fork child.
///
/// It is a command because the server reads its clock once per command and not inside of one: so there is one time by
/// which keys are expired or not.
pub(crate) struct Walk;

impl Command for Walk {
    const NAME: &'static CStr = c"remora.walk";
    const FLAGS: &'static CStr = c"admin deny-script";

    fn run(context: &Context<'_>, _arguments: &[StrRef<'_>]) {
        if !context.flags().is_child() {
            return context.reply_error("ERR remora: only the module itself calls REMORA.WALK, in a fork child");
        }
        work(context);
        context.reply_simple(c"OK");
    }
}

/// The body of `REMORA.WALK`.
fn work(context: &Context<'_>) {
    WORK.with_borrow(|work| {
        let Some(armed) = work else { return };
        if let Err(error) = capture(context, armed) {
            match armed.page.stage() {
                Stage::Begun => armed.page.fail(&error.to_string()),
                _ => armed.page.decline(&error.to_string()),
            }
        }
    });
}

fn capture(context: &Context<'_>, armed: &Armed) -> Result<(), CaptureError> {
    let page = &armed.page;
    // Asked once: each answer is many small allocations, which copy pages of a child.
    let info = context.server_info(c"replication").ok_or(CaptureError::NoAnswer("INFO replication"))?;
    let point = walk::fork_point(context, &info)?;
    let eased = without_compression(context);
    match page.order().work {
        Work::Ease => {
            eased?;
            page.ask(&point)?;
            page.begin()?;
        }
        work @ (Work::Walk | Work::FastWalk) => {
            super::check(context, &info)?;
            let fast = (work == Work::FastWalk).then(|| walk::checked(context)).transpose()?;
            let table = armed.table.as_ref().ok_or(CaptureError::NoTable)?;
            let descriptor = table.try_clone().map_err(|error| CaptureError::System(error.to_string()))?;
            let memory = Memory::adopt(descriptor, page.order().geometry.memory_len())?;
            page.ask(&point)?;
            wait_for_permission(page)?;
            // Held for as long as this process writes to the table. The claim ends with the process, however it ends;
            // then the agent knows that no process writes there any more.
            let _claim = memory.claim()?.ok_or(CaptureError::Claimed)?;
            // Clients that watch a key or have it cached watch the primary's key, which stays.
            context.set_module_options(
                OPTION_HANDLE_IO_ERRORS | OPTION_HANDLE_REPL_ASYNC_LOAD | OPTION_NO_IMPLICIT_SIGNAL_MODIFIED,
            );
            page.begin()?;
            match fast {
                None => walk::run(context, page, memory.into(), &point)?,
                Some(server) => walk::run_fast(context, page, memory.into(), &point, &server)?,
            }
        }
    }
    page.finish();
    Ok(())
}

/// Waits until the agent confirms that the server has forked for it.
fn wait_for_permission(page: &CapturePage) -> Result<(), CaptureError> {
    let asked = Instant::now();
    while !page.is_permitted() {
        if page.is_cancelled() {
            return Err(CaptureError::Cancelled);
        }
        if asked.elapsed() > PERMISSION_LIMIT {
            return Err(CaptureError::NotPermitted(PERMISSION_LIMIT.as_secs()));
        }
        thread::sleep(PERMISSION_POLL);
    }
    Ok(())
}

/// How long a child waits for its permission: the agent has a line to read that was sent before the fork. A child that
/// works for another replica loses this time.
const PERMISSION_LIMIT: Duration = Duration::from_secs(3);

/// How often the child checks for its permission.
const PERMISSION_POLL: Duration = Duration::from_micros(100);

/// Makes the server save without compression: a setting of this process only, since the process is a copy.
fn without_compression(context: &Context<'_>) -> Result<(), CaptureError> {
    let words = ["SET", "rdbcompression", "no"].map(|word| OwnedStr::new(context, word.as_bytes()));
    let arguments: Vec<_> = words.iter().map(OwnedStr::borrow).collect();
    let reply = context.call(c"CONFIG", &arguments).ok_or(CaptureError::NoAnswer("CONFIG SET"))?;
    reply.error().map_or(Ok(()), |text| Err(CaptureError::Refused { command: "CONFIG SET", text }))
}
