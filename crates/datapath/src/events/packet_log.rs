//! A trace line for every packet under the name `egress_ebpf`, if the object was built for it (`cargo xtask build
//! --log-packets`). The normal object has no map for this, and this module does nothing.

use std::time::Duration;

use aya::Ebpf;
use aya_log::{EbpfLogger, Error};
use tokio::task::JoinSet;
use tokio::time::interval;
use tracing::warn;

use egress_supervise::{self, Task};

/// Short enough for interactive use.
const INTERVAL: Duration = Duration::from_millis(50);

/// Reads for as long as the tasks live.
pub fn start(ebpf: &mut Ebpf, tasks: &mut JoinSet<()>) {
    let mut logger = match EbpfLogger::init(ebpf) {
        Ok(logger) => logger,
        Err(Error::MapNotFound) => return,
        Err(error) => return warn!(%error, "cannot read the packet log of the programs"),
    };
    warn!("the programs log every packet: they are for looking, not for work");
    let follow = async move {
        let mut tick = interval(INTERVAL);
        loop {
            tick.tick().await;
            logger.flush();
        }
    };
    tasks.spawn(egress_supervise::forever(Task::PacketLog, follow));
}
