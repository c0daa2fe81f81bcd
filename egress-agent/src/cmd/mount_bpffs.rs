//! `egress-agent mount-bpffs`.

use std::path::PathBuf;

use clap::Args;
use egress_datapath::bpffs::{MountOutcome, mount_at};

use crate::cmd::CliError;

#[derive(Args, Debug)]
pub(super) struct MountBpffsArgs {
    /// Existing directory to mount it at; in a container, one of the host with mount propagation
    #[arg(long, env = "EGRESS_AGENT_MOUNT_POINT", value_name = "DIRECTORY", default_value = "/sys/fs/bpf")]
    mount_point: PathBuf,
}

pub(super) fn run(args: &MountBpffsArgs) -> Result<(), CliError> {
    let point = args.mount_point.display();
    match mount_at(&args.mount_point)? {
        MountOutcome::Mounted => println!("mounted a BPF file system at {point}"),
        MountOutcome::AlreadyMounted => println!("{point} is on a BPF file system"),
    }
    Ok(())
}
