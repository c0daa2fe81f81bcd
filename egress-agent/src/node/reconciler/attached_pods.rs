//! Pods whose network the CNI has just made, and whose start waits until this node's maps know them.

use tokio::sync::oneshot;
use tracing::debug;

use crate::node::reconciler::Reconciler;
use egress_core::model::view::Attach;
use egress_core::plan::executor::Executor;

/// Who waits, and for what. Whoever has waited long enough goes away by itself.
#[derive(Debug, Default)]
pub(super) struct Attaching(Vec<(Attach, oneshot::Sender<Option<String>>)>);

impl<E: Executor> Reconciler<E> {
    pub(super) fn attach(&mut self, attach: Attach, asker: oneshot::Sender<Option<String>>) {
        debug!(pod = attach.pod.name, namespace = attach.pod.namespace, addresses = ?attach.addresses, "the CNI has given");
        self.compiler.attach(&attach);
        self.attaching.0.push((attach, asker));
    }

    /// Answers those for whom all is done.
    pub(super) fn settle_attached(&mut self) {
        for (attach, asker) in std::mem::take(&mut self.attaching.0) {
            if asker.is_closed() {
                continue;
            }
            match self.compiler.attached(&attach) {
                Some(Err(refusal)) => drop(asker.send(Some(refusal.why.to_string()))),
                Some(Ok(())) if self.is_written(&attach) => drop(asker.send(None)),
                Some(Ok(())) | None => self.attaching.0.push((attach, asker)),
            }
        }
    }

    /// Does the kernel have what is desired of these addresses?
    fn is_written(&self, attach: &Attach) -> bool {
        let (Some(actual), Some(desired)) = (&self.actual, self.compiler.desired()) else { return false };
        attach.addresses.iter().all(|address| {
            actual.pods.get(address) == desired.pods.get(address)
                && actual.owners.get(address) == desired.owners.get(address)
        })
    }
}
