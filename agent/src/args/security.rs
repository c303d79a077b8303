//! The option that says what protects the connections between agents.

use clap::Args;

use crate::conversation::Security;

/// What protects the connections between agents.
#[derive(Clone, Copy, Debug, Args)]
pub struct SecurityArgs {
    /// What protects the connections between agents, the same at all of them. `token`: TLS 1.3, authenticated by the
    /// token; RDMA, which TLS does not protect, is not used. `none`: the data can be read and changed on the network.
    #[arg(long, value_name = "HOW", default_value = "none", help_heading = "Security")]
    pub security: Security,
}
