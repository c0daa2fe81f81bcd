//! Faults put on the lab, and taken off again.

use anyhow::{Context, Result};

use super::fault::Fault;
use super::loaded_cluster::LoadedCluster;
use egress_lab::agents;
use egress_lab::cut::NetworkCut;
use egress_lab::machine::StoppedMachine;
use egress_lab::topology::addresses::NodeNumber;

/// What is hit: the gateway of the address that the round is about, and the node of the controller that leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FaultTarget {
    pub(super) gateway: NodeNumber,
    pub(super) leader: NodeNumber,
    pub(super) subject: usize,
}

impl FaultTarget {
    /// The node that the fault is on, if it is on one.
    pub(super) fn node(&self, fault: Fault) -> Option<NodeNumber> {
        match fault {
            Fault::ApiServer | Fault::Edit | Fault::Recreate | Fault::Restart => None,
            Fault::Leader => Some(self.leader),
            Fault::Cut
            | Fault::PowerOff
            | Fault::Uplink
            | Fault::Management
            | Fault::Kill
            | Fault::Stop
            | Fault::Label
            | Fault::Pause
            | Fault::NoApi
            | Fault::Isolate
            | Fault::CrashLoop
            | Fault::DeleteNode
            | Fault::Nic
            | Fault::NicSwitch => Some(self.gateway),
        }
    }
}

/// Begins a fault.
pub(super) fn begin(cluster: &mut LoadedCluster, fault: Fault, target: FaultTarget) -> Result<()> {
    let node = cluster.base.lab.node(target.gateway).clone();
    match fault {
        Fault::Cut => {
            cluster.base.lab.set_lan(&node, false)?;
            cluster.base.lab.set_second_port(&node, false)?;
            cluster.base.lab.set_overlay(&node, false)
        }
        Fault::PowerOff => {
            agents::power(&cluster.base.lab, &mut cluster.base.agents[target.gateway.index()], false)?;
            cluster.base.lab.set_pods(&node, false)?;
            // A node that boots has no programs of its former life.
            cluster.agent(target.gateway).clean_up().map(drop)
        }
        Fault::Uplink => cluster.base.lab.set_carrier(&node, false),
        Fault::Management => cluster.base.lab.set_overlay(&node, false),
        Fault::Kill => cluster.agent(target.gateway).kill(),
        Fault::Leader => cluster.agent(target.leader).controller()?.kill(),
        Fault::Stop => cluster.agent(target.gateway).pause(),
        Fault::ApiServer => cluster.base.set_outage(true),
        Fault::Label => cluster.assignable(target.gateway, false),
        Fault::Edit => cluster.turn(target.subject),
        Fault::Recreate => cluster.delete(target.subject),
        // One after the other would leave time for each to come back before the next goes.
        Fault::Restart => {
            agents::Agent::controllers(&mut cluster.base.agents).try_for_each(agents::Controller::kill)?;
            cluster.base.agents.iter_mut().try_for_each(agents::Agent::kill)
        }
        Fault::Pause => {
            cluster.stopped =
                Some(StoppedMachine::stop(&cluster.base.lab, &mut cluster.base.agents[target.gateway.index()])?);
            Ok(())
        }
        Fault::NoApi => cluster.base.lab.cut(&NetworkCut::ApiServer(target.gateway)),
        Fault::Isolate => cluster.base.lab.cut(&NetworkCut::Nodes(target.gateway)),
        Fault::CrashLoop => cluster.agent(target.gateway).restart(),
        Fault::DeleteNode => cluster.delete_node(target.gateway),
        Fault::Nic => cluster.base.lab.set_second_carrier(&node, false),
        Fault::NicSwitch => cluster.base.lab.set_second_port(&node, false),
    }
}

/// Ends it.
pub(super) fn end(cluster: &mut LoadedCluster, fault: Fault, target: FaultTarget) -> Result<()> {
    let node = cluster.base.lab.node(target.gateway).clone();
    match fault {
        Fault::Cut => {
            cluster.base.lab.set_lan(&node, true)?;
            cluster.base.lab.set_second_port(&node, true)?;
            cluster.base.lab.set_overlay(&node, true)
        }
        Fault::PowerOff => {
            agents::power(&cluster.base.lab, &mut cluster.base.agents[target.gateway.index()], true)?;
            // Its pods come after its agent, as they do where the node is not ready before.
            cluster.wait_for_agents()?;
            cluster.base.lab.set_pods(&node, true)
        }
        Fault::Uplink => cluster.base.lab.set_carrier(&node, true),
        Fault::Management => cluster.base.lab.set_overlay(&node, true),
        Fault::Kill => cluster.agent(target.gateway).restart(),
        Fault::Leader => cluster.agent(target.leader).controller()?.restart(),
        Fault::Stop => cluster.agent(target.gateway).resume(),
        Fault::ApiServer => cluster.base.set_outage(false),
        Fault::Label => cluster.assignable(target.gateway, true),
        Fault::Edit => Ok(()),
        Fault::Recreate => cluster.create(target.subject),
        Fault::Restart => {
            agents::Agent::controllers(&mut cluster.base.agents).try_for_each(agents::Controller::restart)?;
            cluster.base.agents.iter_mut().try_for_each(agents::Agent::restart)
        }
        Fault::Pause => {
            let machine = cluster.stopped.take().context("no machine is stopped")?;
            machine.resume(&cluster.base.lab, &mut cluster.base.agents[target.gateway.index()]).map(drop)
        }
        Fault::NoApi => cluster.base.lab.mend(&NetworkCut::ApiServer(target.gateway)),
        Fault::Isolate => cluster.base.lab.mend(&NetworkCut::Nodes(target.gateway)),
        Fault::CrashLoop => cluster.agent(target.gateway).restart(),
        Fault::DeleteNode => cluster.create_node(target.gateway),
        Fault::Nic => cluster.base.lab.set_second_carrier(&node, true),
        Fault::NicSwitch => cluster.base.lab.set_second_port(&node, true),
    }
}
