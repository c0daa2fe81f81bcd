//! A line about every packet, at level trace under the name `egress_ebpf`: only where the object was built to write them
//! (`cargo xtask build --log-packets`). The object that is meant for work has no map for it, and nothing happens here.

use std::time::Duration;

use aya::Ebpf;
use aya_log::{EbpfLogger, Error};
use tokio::task::JoinSet;
use tokio::time::interval;
use tracing::warn;

use egress_supervise::{self, Task};

/// A person who watches does not notice the delay.
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
