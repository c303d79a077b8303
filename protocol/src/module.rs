//! What the agents and the server's module agree on. `docs/module.md` describes the commands.

/// The version of the commands between the agents and the server's module (`REMORA.STATUS` reports it as `protocol`).
/// Both sides work together only if they have the same one.
///
/// Versions, newest first:
///
/// - 5: runs have small collections among their strings; `fast_keys` and `fast_capture` are `yes`, or `no` and why.
/// - 4: `REMORA.LOAD` answers whether the module takes runs of short strings (`fast_keys`), and `REMORA.STATUS` whether
///   its fork child writes them (`fast_capture`).
/// - 3: `REMORA.LOAD` answers names and values (`idle_times`) where it answered `OK` or `OK NOIDLE`.
/// - 2: the fork child writes long strings only, and asks for permission before it begins.
/// - 1: the fork child writes the whole snapshot.
pub const MODULE_PROTOCOL: u32 = 5;
