-- How a TrainingRun is, for Argo CD. Written for what Argo CD gives a health check: Lua 5.1 and its base library.
--
-- Progressing  the operator has not seen this spec yet; the run waits, starts, is moved or stops
-- Healthy      it runs, or it is complete
-- Suspended    it is suspended as its spec says, or a queue holds it
-- Degraded     it has failed for good, or a person is needed

local conditions = {}
if obj.status ~= nil and obj.status.conditions ~= nil then
  for _, condition in ipairs(obj.status.conditions) do
    conditions[condition.type] = condition
  end
end

local function holds(kind)
  return conditions[kind] ~= nil and conditions[kind].status == "True"
end

if conditions.Ready == nil or obj.status.observedGeneration ~= obj.metadata.generation then
  return {status = "Progressing", message = "the operator has not seen this spec yet"}
end

local status = holds("Ready") and "Healthy" or "Progressing"
if holds("Stalled") then
  status = "Degraded"
elseif holds("Suspended") then
  status = "Suspended"
end
-- Whatever the run is, the message of Ready says it as a sentence.
return {status = status, message = conditions.Ready.message}
