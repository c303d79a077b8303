//! `xtask bindings`: generates the types of libibverbs and librdmacm from the installed headers, or compares them.
//!
//! Needs the headers (Debian: libibverbs-dev librdmacm-dev libclang1-14) and the bindgen program in the version below,
//! since another version writes the same types differently: `cargo install bindgen-cli --version 0.72.1 --locked`. A
//! build of Remora needs neither.

use std::fs;
use std::path::Path;
use std::process::Command;

use clap::Args;
use remora_bench::sync::Result;

/// Command-line arguments.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Change nothing; fail if the checked-in file differs from the headers.
    #[arg(long)]
    check: bool,
}

/// The version that wrote the checked-in file.
const VERSION: &str = "bindgen 0.72.1";

const FOLDER: &str = "rdma/src/bindings";

/// The types that are used. Bindgen adds the types they contain.
const TYPES: &str = "ibv_device|ibv_context|ibv_device_attr|ibv_pd|ibv_mr|ibv_cq|ibv_comp_channel|ibv_qp|ibv_qp_init_attr|\
    ibv_qp_attr|ibv_qp_attr_mask|ibv_access_flags|ibv_sge|ibv_send_wr|ibv_recv_wr|ibv_wc|ibv_wc_status|ibv_wc_opcode|\
    ibv_send_flags|ibv_srq_init_attr|ibv_async_event|ibv_fork_status|rdma_cm_id|rdma_cm_event|rdma_conn_param|rdma_event_channel|rdma_port_space";

/// Types of which only the size matters.
const OPAQUE: &str = "sockaddr.*|ibv_srq|ibv_mw|ibv_ah|ibv_wq|ibv_xrcd|_ibv_device_ops|_compat_ibv_port_attr|ibv_mw_bind|\
    ibv_sa_path_rec|rdma_ud_param";

/// The head of the checks of a type's layout.
const CHECK: &str = "\nconst _: () = {";

pub(crate) fn run(options: &Options) -> Result<()> {
    let found = Command::new("bindgen").arg("--version").output();
    let found = found.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default();
    if found != VERSION {
        let found = if found.is_empty() { "no bindgen".to_owned() } else { found };
        return Err(format!("needs {VERSION}, found {found}; see the head of dev/xtask/src/bindings.rs").into());
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(FOLDER);
    let made = generate(&folder)?;
    let file = folder.join("types.rs");
    if !options.check {
        return Ok(fs::write(file, made)?);
    }
    if fs::read_to_string(&file)? != made {
        let text =
            format!("{FOLDER}/types.rs differs from the headers: run this without --check and review the change");
        return Err(text.into());
    }
    println!("{FOLDER}/types.rs matches the headers");
    Ok(())
}

fn generate(folder: &Path) -> Result<String> {
    let made = Command::new("bindgen")
        // In that folder, so that rustfmt finds the project's settings.
        .current_dir(folder)
        .arg("wrapper.h")
        .args(["--allowlist-type", TYPES, "--allowlist-var", "RDMA_OPTION_ID_TOS|RDMA_OPTION_ID"])
        .args(["--blocklist-type", "pthread_mutex_t|pthread_cond_t|__pthread.*"])
        .args(["--raw-line", "use libc::{pthread_cond_t, pthread_mutex_t};", "--opaque-type", OPAQUE])
        .args(["--no-doc-comments", "--no-prepend-enum-name", "--use-core"])
        .args(["--rust-target", "1.85", "--rust-edition", "2024"])
        .output()?;
    match made.status.success() {
        // The checks of sizes hold where they were made: the locks of the C library have other sizes elsewhere.
        true => {
            Ok(String::from_utf8(made.stdout)?.replace(CHECK, &format!("\n#[cfg(target_arch = \"x86_64\")]{CHECK}")))
        }
        false => Err(format!("bindgen: {}", String::from_utf8_lossy(&made.stderr)).into()),
    }
}
