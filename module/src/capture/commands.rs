//! The commands of the module, for agents and people.

use std::ffi::CStr;

use remora_protocol::MODULE_PROTOCOL;

use super::armed;
use crate::api::{Command, Context, StrRef};
use crate::{fast, load};

/// `REMORA.ARM address secret`: an agent offers a page, and a table, for the next snapshot.
pub(crate) struct Arm;

impl Command for Arm {
    const NAME: &'static CStr = c"remora.arm";
    // The secret must not appear in MONITOR or in the slow log; a server that is loading has nothing to capture.
    const FLAGS: &'static CStr = c"admin deny-script no-monitor no-slowlog";

    fn run(context: &Context<'_>, arguments: &[StrRef<'_>]) {
        let [address, secret] = arguments else { return wrong_arity(context, "REMORA.ARM address secret") };
        let (Some(address), Some(secret)) = (address.as_str(), secret.as_str()) else {
            return context.reply_error("ERR remora: address and secret must be UTF-8 text");
        };
        match armed::arm(context, address, secret) {
            Ok(_) => context.reply_simple(c"OK"),
            Err(refused @ armed::ArmError::Busy(_)) => context.reply_error(&format!("BUSY remora: {refused}")),
            Err(refused) => context.reply_error(&format!("ERR remora: {refused}")),
        }
    }
}

/// `REMORA.DISARM [generation]`: the agent does not need the armed state any more.
pub(crate) struct Disarm;

impl Command for Disarm {
    const NAME: &'static CStr = c"remora.disarm";
    const FLAGS: &'static CStr = c"admin deny-script";

    fn run(context: &Context<'_>, arguments: &[StrRef<'_>]) {
        let generation = match arguments {
            [] => None,
            [generation] => match generation.as_str().and_then(|text| text.parse().ok()) {
                Some(generation) => Some(generation),
                None => return context.reply_error("ERR remora: a generation must be a number"),
            },
            _ => return wrong_arity(context, "REMORA.DISARM [generation]"),
        };
        context.reply_integer(i64::from(armed::disarm(context, generation)));
    }
}

/// `REMORA.STATUS`: names and values in turn.
pub(crate) struct Status;

impl Command for Status {
    const NAME: &'static CStr = c"remora.status";
    const FLAGS: &'static CStr = c"admin deny-script allow-loading allow-stale";

    fn run(context: &Context<'_>, _arguments: &[StrRef<'_>]) {
        let (state, generation) = armed::state();
        let history = armed::history();
        let pairs = [
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("protocol", MODULE_PROTOCOL.to_string()),
            ("capture", if armed::ALLOWED.get() { "yes" } else { "no" }.to_owned()),
            ("load", if load::is_registered() { "yes" } else { "no" }.to_owned()),
            ("fast_keys", fast::state()),
            ("fast_capture", fast::offer_walk(context).map_or_else(|why| format!("no: {why}"), |_| "yes".to_owned())),
            (
                "syncs_go_to",
                if armed::syncs_go_to_sockets(context).unwrap_or(true) { "sockets" } else { "files" }.to_owned(),
            ),
            ("load_state", load::state().to_owned()),
            ("state", state.to_owned()),
            ("generation", generation.map_or(String::new(), |generation| generation.to_string())),
            ("captures_done", history.done.to_string()),
            ("captures_failed", history.failed.to_string()),
            ("last_bytes", history.last.received.to_string()),
            ("last_keys", history.last.keys.to_string()),
            ("last_micros", history.last.took_micros.to_string()),
            ("last_error", history.last_error),
        ];
        context.reply_array(2 * pairs.len());
        for (name, value) in pairs {
            context.reply_bytes(name.as_bytes());
            context.reply_bytes(value.as_bytes());
        }
    }
}

/// `REMORA.HELP`.
pub(crate) struct Help;

impl Command for Help {
    const NAME: &'static CStr = c"remora.help";
    const FLAGS: &'static CStr = c"allow-loading allow-stale";

    fn run(context: &Context<'_>, _arguments: &[StrRef<'_>]) {
        context.reply_array(HELP.len());
        for line in HELP {
            context.reply_bytes(line.as_bytes());
        }
    }
}

const HELP: &[&str] = &[
    "REMORA.ARM address secret -- take a capture page, and a table, offered at a local socket; the next sync's fork \
     child writes into it",
    "REMORA.DISARM [generation] -- forget what was armed; the reply is 1 if something was armed, else 0",
    "REMORA.SWEEP address secret -- take a socket offered at a local socket, and send a snapshot over it without a fork; the reply has \
     its replid and offset",
    "REMORA.LOAD address secret ticket length [FLUSH] -- take memory that fields of the next snapshot refer to",
    "REMORA.STATUS -- names and values: version, protocol, state, counters",
    "REMORA.HELP -- this text",
    "Settings: remora.capture (yes or no), remora.fast-keys (yes or no), remora.sweep-share (percent), remora.agent-timeout (seconds). INFO remora has the same fields as \
     REMORA.STATUS.",
];

fn wrong_arity(context: &Context<'_>, usage: &str) {
    context.reply_error(&format!("ERR remora: wrong number of arguments; usage: {usage}"));
}
