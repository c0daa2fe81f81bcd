//! Asking nodes through the overlay, beside asking their agents.

use super::*;
use egress_datapath::overlay::probe::{Echo, Question};

/// Asking nodes through the overlay.
pub struct Overlay {
    /// Of its packets.
    pub port: u16,
    pub ask: mpsc::Sender<Question>,
    pub echoes: mpsc::Receiver<Echo>,
}

/// Never, where nobody is asked that way.
pub(super) async fn echo(overlay: &mut Option<Overlay>) -> Option<Echo> {
    match overlay {
        Some(overlay) => overlay.echoes.recv().await,
        None => std::future::pending().await,
    }
}

impl Round {
    /// Asks every node that answers there, once in each interval.
    pub(super) fn ask_through(&mut self, overlay: &Overlay) {
        let now = Instant::now();
        if self.asked_through.is_some_and(|asked| now < asked + self.manner.rules.interval) {
            return;
        }
        self.asked_through = Some(now);
        for (name, asked) in &self.asked {
            if let (Some(to), Some(_)) = (asked.endpoint, asked.overlay)
                && *name != self.own_node
            {
                // Where questions pile up one is left out, and the next comes soon.
                let _left_out = overlay.ask.try_send(Question { node: name.as_str().into(), to });
            }
        }
    }
}
