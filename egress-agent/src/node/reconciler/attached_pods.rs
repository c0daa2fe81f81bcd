//! Pods whose network the CNI has just set up; their start waits until this node's maps have their addresses.

use tokio::sync::oneshot;
use tracing::debug;

use crate::node::reconciler::Reconciler;
use egress_core::model::view::Attach;
use egress_core::plan::executor::Executor;

/// Waiting plugins with their pods. A plugin closes its channel at its timeout.
#[derive(Debug, Default)]
pub(super) struct PendingAttachments(Vec<(Attach, oneshot::Sender<Option<String>>)>);

impl<E: Executor> Reconciler<E> {
    pub(super) fn attach(&mut self, attach: Attach, reply: oneshot::Sender<Option<String>>) {
        debug!(pod = attach.pod.name, namespace = attach.pod.namespace, addresses = ?attach.addresses, "the CNI has attached a pod");
        self.compiler.attach(&attach);
        self.pending_attachments.0.push((attach, reply));
    }

    /// Answers the plugins whose pods are in the maps, or refused.
    pub(super) fn settle_attached(&mut self) {
        for (attach, reply) in std::mem::take(&mut self.pending_attachments.0) {
            if reply.is_closed() {
                continue;
            }
            match self.compiler.attached(&attach) {
                Some(Err(refusal)) => drop(reply.send(Some(refusal.why.to_string()))),
                Some(Ok(())) if self.is_written(&attach) => drop(reply.send(None)),
                Some(Ok(())) | None => self.pending_attachments.0.push((attach, reply)),
            }
        }
    }

    /// Whether the kernel has the desired state of these addresses.
    fn is_written(&self, attach: &Attach) -> bool {
        let (Some(actual), Some(desired)) = (&self.actual, self.compiler.desired()) else { return false };
        attach.addresses.iter().all(|address| {
            actual.pods.get(address) == desired.pods.get(address)
                && actual.owners.get(address) == desired.owners.get(address)
        })
    }
}
